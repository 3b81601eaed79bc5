// Passages of documents, and the panel that shows one beside its answer.
import { add, addButton, addLink, byId } from "./elements.js";

// Kinds of files that a frame shows: they run no script.
const PDF = "application/pdf";
const FRAMED = [PDF, "text/plain", "image/png", "image/jpeg", "image/webp"];
// For viewers of PDF: the width of the frame, and no column of small pages.
const FITTED = "navpanes=0&view=FitH";
const WIDE = "(min-width: 64rem)";

// Returns what a passage or a citation is called: its number if it has one,
// title, path, page, heading.
export function nameOf(passage) {
  const { path, page, heading } = passage.source ?? passage;
  const number = passage.number ? `[${passage.number}] ` : "";
  const title = passage.title || (path ? "" : (passage.id ?? ""));
  const bare = title.replace(/^"|"$/g, "");
  const below = heading?.replace(`${bare} > `, "");
  const place = [bare, path, page && `page ${page}`, below];
  return number + [...new Set(place.filter(Boolean))].join(" · ");
}

// Returns the address of a passage's file or page; "" without one.
export function addressOf(passage) {
  const address = passage.url ?? passage.source?.url ?? passage.id ?? "";
  if (!URL.canParse(address, document.baseURI)) return "";
  const url = new URL(address, document.baseURI);
  const isFile =
    url.origin === location.origin && url.pathname.startsWith("/documents/");
  const isPage = /^https?:\/\//.test(address);
  return isFile || isPage ? url.href : "";
}

// Adds a button that shows a passage.
export function addPassageButton(parent, text, passage, kind) {
  const button = addButton(parent, text, () => show(passage, button), kind);
  button.title = nameOf(passage);
  return button;
}

let opener = null; // What had the focus when the panel opened.

async function show(passage, button) {
  const panel = byId("source");
  opener = button;
  const content = byId("passage");
  content.replaceChildren();
  add(content, "h2", "", nameOf(passage));
  const address = addressOf(passage);
  if (address) addLink(add(content, "p"), "Open in a new tab", address);
  const text = (passage.text ?? "").replace(/\n\s*\n/g, "\n");
  add(content, "p", "quote", text).dir = "auto";
  panel.hidden = false;
  byId("close").focus();
  if (address && matchMedia(WIDE).matches) await addFrame(content, address);
}

async function addFrame(content, address) {
  if (!address.startsWith(`${location.origin}/`)) return;
  const response = await fetch(address, { method: "HEAD" }).catch(() => null);
  const kind = response?.headers.get("content-type")?.split(";")[0];
  const isShown = content.querySelector("a")?.href === address;
  if (!response?.ok || !FRAMED.includes(kind) || !isShown) return;
  const frame = document.createElement("iframe");
  frame.title = "The document";
  frame.src = address;
  if (kind === PDF) {
    frame.src += (address.includes("#") ? "&" : "#") + FITTED;
  } else {
    frame.setAttribute("sandbox", ""); // In which Chromium shows no PDF.
  }
  content.append(frame);
}

// Hides the panel; returns whether it was there.
export function close() {
  const panel = byId("source");
  if (panel.hidden) return false;
  panel.hidden = true;
  opener?.focus();
  return true;
}
