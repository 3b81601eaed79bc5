// Makes elements. Texts of questions, passages and models come from outside:
// they are written as text, never as markup.

// Characters that turn the direction of the text after them, so that a reader
// sees another name or address than there is.
const TURNS_TEXT = /[\u202a-\u202e\u2066-\u2069]/g;

export const byId = (id) => document.getElementById(id);

// Returns a text whose invisible turns of direction are visible.
export const visible = (text) => text.replace(TURNS_TEXT, "\ufffd");

// Adds an element to `parent`; "" is no class.
export function add(parent, tag, kind = "", text = "") {
  const element = document.createElement(tag);
  if (kind) element.className = kind;
  if (text) element.textContent = visible(text);
  parent.append(element);
  return element;
}

export function addButton(parent, text, onClick, kind = "") {
  const button = add(parent, "button", kind, text);
  button.type = "button";
  button.addEventListener("click", onClick);
  return button;
}

// Adds a link that opens in a new tab, which learns nothing of this one.
export function addLink(parent, text, address) {
  const link = add(parent, "a", "", text);
  link.href = address;
  link.target = "_blank";
  link.rel = "noopener noreferrer";
  return link;
}

// Adds a button that copies what `textOf` returns, and says so for a while.
export function addCopyButton(parent, textOf) {
  const button = addButton(parent, "Copy", async () => {
    button.textContent = (await copied(textOf())) ? "Copied" : "Not copied";
    setTimeout(() => (button.textContent = "Copy"), SAID_MILLISECONDS);
  });
  return button;
}

const SAID_MILLISECONDS = 2000;

// Copies a text; returns whether the browser allowed it.
async function copied(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return copiedFromField(text);
  }
}

// Copies as browsers do for pages at an address that is not encrypted.
function copiedFromField(text) {
  const before = document.activeElement;
  const field = add(document.body, "textarea", "unseen");
  field.value = text;
  field.select();
  const isCopied = document.execCommand("copy");
  field.remove();
  before.focus();
  return isCopied;
}

// Has the browser store a text as a file.
export function save(name, kind, text) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type: kind }));
  link.download = name;
  link.click();
  // The download has its own reference to the data by the next task.
  setTimeout(() => URL.revokeObjectURL(link.href));
}

export const count = (number, one, more) =>
  `${number.toLocaleString("en")} ${number === 1 ? one : more}`;
