// Shows Markdown as elements: headings, paragraphs, lists, quotes, tables,
// code, emphasis, links. HTML is text, an image is a link to it, and a link goes
// to the web only. The time is linear in the length of the text, whatever it is.
import { add, addCopyButton, addLink, visible } from "./elements.js";

const MOST_NESTED = 6; // Lists and quotes inside each other.
const MOST_MARKS = 8; // Emphases inside each other.
const MOST_INLINE_CHARACTERS = 20000; // The rest of a paragraph is plain text.
const SAFE_PROTOCOLS = ["http:", "https:", "mailto:"];

const FENCE = /^ {0,3}(`{3,}|~{3,})([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})(?:[ \t]+(.*))?$/;
const RULE = /^ {0,3}([-*_])[ \t]*(?:\1[ \t]*){2,}$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( {0,3})([-*+•]|\d{1,9}[.)])([ \t]{1,4})(?=\S)/;
const TABLE_RULE = /^:?-+:?$/;

// Bounds keep the search for an end short where there is none.
const TICKS = String.raw`(?<!\`)(?<ticks>\`{1,3})(?!\`)`;
const CODE = String.raw`${TICKS}(?<code>.{1,1000}?)(?<!\`)\k<ticks>(?!\`)`;
const LABEL = String.raw`(?<image>!?)\[(?<label>[^[\]]{0,300})\]`;
const BRACKETS = String.raw`\([^\s()<>]{0,300}\)[^\s()<>]{0,300}`;
const TARGET = String.raw`\s?<?(?<target>[^\s()<>]{1,2000}(?:${BRACKETS})?)>?`;
const BARE = String.raw`https?://[^\s<>"\`|]{0,2000}[^\s<>"\`|.,;:!?'*_~()[\]]`;
const INLINE = new RegExp(
  [
    String.raw`\\(?<escaped>[!-/:-@[-\`{-~])`,
    CODE,
    String.raw`\[(?<cited>[1-9][0-9]{0,2})\]`,
    String.raw`${LABEL}\(${TARGET}(?:\s"[^"]{0,300}")?\)`,
    String.raw`<(?<auto>https?://[^\s<>]{1,2000})>`,
    `(?<bare>${BARE})`,
    "(?<break><br ?/?>)",
    String.raw`(?<mark>\*{1,3}|_{1,3}|~~)`,
  ].join("|"),
  "gs",
);

// Adds a text to `parent`. `cite` gets the number of a mark such as [2] and an
// element to add its citation to; it returns whether there is one.
export function addMarkdown(parent, text, cite = () => false) {
  addBlocks(parent, text.split(/\r\n?|\n/), cite, 0);
}

// Each kind of block reads the lines from `start`, and returns the index after
// its last line, or `start` if the lines are no such block.
const BLOCKS = [addFence, addHeading, addRule, addQuote, addList, addTable];

function addBlocks(parent, lines, cite, depth) {
  let start = 0;
  for (;;) {
    start = afterBlankLines(lines, start);
    if (start >= lines.length) return;
    let end = start;
    for (const addBlock of BLOCKS) {
      end = addBlock(parent, lines, start, cite, depth);
      if (end > start) break;
    }
    start = end > start ? end : addParagraph(parent, lines, start, cite, depth);
  }
}

function addFence(parent, lines, start) {
  const fence = FENCE.exec(lines[start]);
  if (!fence) return start;
  const closing = new RegExp(`^ {0,3}${fence[1][0]}{${fence[1].length},}\\s*$`);
  let end = start + 1;
  while (end < lines.length && !closing.test(lines[end])) end += 1;
  const code = lines.slice(start + 1, end).join("\n");
  const block = add(parent, "div", "code");
  const bar = add(block, "div", "bar");
  add(bar, "span", "", fence[2].trim());
  addCopyButton(bar, () => code);
  const pre = add(block, "pre");
  pre.tabIndex = 0; // Arrow keys scroll it.
  add(pre, "code", "", code);
  return end + 1;
}

function addHeading(parent, lines, start, cite) {
  const heading = HEADING.exec(lines[start]);
  if (!heading) return start;
  const level = Math.min(heading[1].length + 2, 6); // The page has h1 and h2.
  const text = (heading[2] ?? "").replace(/\s#+$/, "");
  addInline(add(parent, `h${level}`), text, cite);
  return start + 1;
}

function addRule(parent, lines, start) {
  if (!RULE.test(lines[start])) return start;
  add(parent, "hr");
  return start + 1;
}

function addQuote(parent, lines, start, cite, depth) {
  if (depth === MOST_NESTED || !QUOTE.test(lines[start])) return start;
  let end = start;
  while (end < lines.length && QUOTE.test(lines[end])) end += 1;
  const inner = lines.slice(start, end).map((line) => line.replace(QUOTE, ""));
  addBlocks(add(parent, "blockquote"), inner, cite, depth + 1);
  return end;
}

const indentOf = (line) => line.length - line.trimStart().length;

function addList(parent, lines, start, cite, depth) {
  const first = ITEM.exec(lines[start]);
  if (depth === MOST_NESTED || !first) return start;
  const isOrdered = /\d/.test(first[2]);
  const list = add(parent, isOrdered ? "ol" : "ul");
  if (isOrdered) list.start = Number.parseInt(first[2], 10);
  let end = start;
  while (end < lines.length) {
    const item = ITEM.exec(lines[end]);
    if (!item || /\d/.test(item[2]) !== isOrdered) break;
    if (RULE.test(lines[end])) break;
    const next = endOfItem(lines, end, item[1].length);
    const inner = lines.slice(end, next);
    addItem(list, inner, item[0].length, cite, depth);
    // Blank lines between items are part of the list.
    end = afterBlankLines(lines, next);
    if (!ITEM.test(lines[end] ?? "")) return next;
  }
  return end;
}

function afterBlankLines(lines, start) {
  let end = start;
  while (end < lines.length && !lines[end].trim()) end += 1;
  return end;
}

// Returns the index after an item's lines: those that are indented further than
// its mark, and the lines that continue its paragraph.
function endOfItem(lines, start, indent) {
  let end = start + 1;
  let last = end;
  while (end < lines.length) {
    const line = lines[end];
    if (line.trim()) {
      const isInside = indentOf(line) > indent + 1;
      const continues = end === last && !beginsBlock(line);
      if (!isInside && !continues) break;
      last = end + 1;
    }
    end += 1;
  }
  return last;
}

function addItem(list, lines, indent, cite, depth) {
  const inner = lines.map((line, index) =>
    line.slice(index ? Math.min(indent, indentOf(line)) : indent),
  );
  inner[0] = inner[0].replace(/^\[ \] /, "☐ ").replace(/^\[[xX]\] /, "☑ ");
  addBlocks(add(list, "li"), inner, cite, depth + 1);
}

function beginsBlock(line) {
  const item = ITEM.exec(line);
  return (
    Boolean(item) ||
    [FENCE, HEADING, RULE, QUOTE].some((pattern) => pattern.test(line))
  );
}

function cellsOf(line) {
  const row = line.trim().replace(/^\|/, "");
  const cells = row.split(/(?<!\\)\|/);
  if (!cells.at(-1).trim()) cells.pop();
  return cells.map((cell) => cell.trim().replaceAll("\\|", "|"));
}

function addTable(parent, lines, start, cite) {
  const rule = lines[start + 1];
  if (!lines[start].includes("|") || !rule?.includes("-")) return start;
  const marks = cellsOf(rule);
  if (!marks.length || !marks.every((mark) => TABLE_RULE.test(mark)))
    return start;
  const frame = add(parent, "div", "table");
  frame.tabIndex = 0;
  const table = add(frame, "table");
  const addRow = (section, line, tag) => {
    const row = add(section, "tr");
    for (const [index, text] of cellsOf(line).entries()) {
      const cell = add(row, tag);
      if (marks[index]?.endsWith(":"))
        cell.className = marks[index].startsWith(":") ? "middle" : "right";
      addInline(cell, text, cite);
    }
  };
  addRow(add(table, "thead"), lines[start], "th");
  const body = add(table, "tbody");
  let end = start + 2;
  while (end < lines.length && lines[end].includes("|")) {
    addRow(body, lines[end], "td");
    end += 1;
  }
  return end;
}

function addParagraph(parent, lines, start, cite) {
  let end = start + 1;
  while (end < lines.length && lines[end].trim()) {
    // A line that begins with the end of a sentence, such as 1984., is no list.
    const isLaterNumber = /^ {0,3}(?!1[.)])\d/.test(lines[end]);
    if (beginsBlock(lines[end]) && !isLaterNumber) break;
    end += 1;
  }
  addInline(add(parent, "p"), lines.slice(start, end).join("\n").trim(), cite);
  return end;
}

function addInline(parent, text, cite) {
  const head = text.slice(0, MOST_INLINE_CHARACTERS);
  const marks = new Marks(parent);
  let end = 0;
  for (const token of head.matchAll(INLINE)) {
    marks.write(head.slice(end, token.index));
    end = token.index + token[0].length;
    addToken(marks, token, head, cite);
  }
  marks.write(head.slice(end));
  marks.end();
  parent.append(visible(text.slice(MOST_INLINE_CHARACTERS)));
}

function addToken(marks, token, text, cite) {
  const groups = token.groups;
  if (groups.mark) {
    marks.read(
      groups.mark,
      text[token.index - 1],
      text[token.index + token[0].length],
    );
  } else if (groups.escaped) {
    marks.write(groups.escaped);
  } else if (groups.code) {
    add(marks.parent, "code", "", groups.code);
  } else if (groups.break) {
    marks.write("\n");
  } else if (groups.cited) {
    if (!cite(Number(groups.cited), marks.parent)) marks.write(token[0]);
  } else {
    const address = groups.target ?? groups.auto ?? groups.bare;
    const label = (groups.label ?? address).replace(/\*\*|__|`/g, "");
    const text = groups.image ? `image: ${label || address}` : label || address;
    if (!addSafeLink(marks.parent, text, address)) marks.write(token[0]);
  }
}

// Adds a link to the web, and its host if the text names another; returns
// whether the address is one of the web.
function addSafeLink(parent, text, address) {
  if (!URL.canParse(address)) return false;
  const url = new URL(address);
  if (!SAFE_PROTOCOLS.includes(url.protocol)) return false;
  addLink(parent, text, url.href);
  const place = url.host || url.pathname;
  const isNamed = text.startsWith(url.host ? url.origin : place);
  if (!isNamed) add(parent, "span", "host", ` (${place})`);
  return true;
}

// The emphases that are open: a mark is one if an equal one ends it, otherwise
// it is text.
class Marks {
  constructor(parent) {
    this.bottom = parent;
    this.open = [];
  }

  get parent() {
    return this.open.at(-1)?.element ?? this.bottom;
  }

  write(text) {
    const last = this.parent.lastChild;
    if (last?.nodeType === Node.TEXT_NODE) last.appendData(visible(text));
    else if (text) this.parent.append(visible(text));
  }

  read(run, before = " ", after = " ") {
    const isWord = (character) => /[\p{L}\p{N}]/u.test(character);
    const inWord = run[0] === "_" && isWord(before) && isWord(after);
    const canEnd = before.trim() && !inWord;
    const canBegin = after.trim() && !inWord;
    let rest = run;
    while (rest) {
      const index = canEnd ? this.beginning(rest) : -1;
      if (index >= 0) {
        rest = rest.slice(this.open[index].mark.length);
        this.close(index);
      } else if (canBegin && this.open.length < MOST_MARKS) {
        const mark = rest.slice(0, 2);
        rest = rest.slice(mark.length);
        this.begin(mark);
      } else {
        this.write(rest);
        rest = "";
      }
    }
  }

  // Returns the index of the open mark that a run ends; -1 without one.
  beginning(run) {
    const equal = this.open.findLastIndex(({ mark }) => mark === run);
    if (equal >= 0) return equal;
    return this.open.findLastIndex(({ mark }) => run.startsWith(mark));
  }

  begin(mark) {
    const tags = { "~~": "del", "**": "strong", __: "strong" };
    const element = add(this.parent, tags[mark] ?? "em");
    this.open.push({ mark, element });
  }

  // Closes the mark at an index; those after it had no end, and are text.
  close(index) {
    while (this.open.length > index + 1) this.unwrap();
    this.open.pop();
  }

  unwrap() {
    const { mark, element } = this.open.pop();
    element.before(mark);
    while (element.firstChild) element.before(element.firstChild);
    element.remove();
  }

  end() {
    while (this.open.length) this.unwrap();
  }
}
