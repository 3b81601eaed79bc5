// An answer on the page: its steps, its text, its sources.
import { citationsOf, costOf, markdownOf, messageOf } from "./conversation.js";
import {
  add,
  addButton,
  addCopyButton,
  count,
  save,
  visible,
} from "./elements.js";
import { addMarkdown } from "./markdown.js";
import { addPassageButton, addressOf, nameOf } from "./source.js";

const DRAFT_MILLISECONDS = 100; // Between two looks at an unfinished answer.

// Shows an answer of a conversation, and what is read into it.
//
// parent: the element that gets it.
// answer: what is shown; `read` adds to it.
// isCompared: whether it stands beside others.
// askAgain: called with this view for another answer in its place.
export class AnswerView {
  constructor(parent, answer, isCompared, askAgain) {
    this.answer = answer;
    this.askAgain = askAgain;
    this.card = add(parent, "section", "reply");
    if (isCompared) add(this.card, "h3", "", `Budget ${answer.budget}`);
    this.steps = add(this.card, "details", "steps");
    this.summary = add(this.steps, "summary");
    this.searches = 0;
    this.passages = new Map(); // By number.
    this.text = add(this.card, "div", "text");
    this.text.dir = "auto";
    for (const item of answer.output) this.showItem(item);
  }

  showItem(item) {
    if (item.type === "reasoning") {
      this.beginReasoning(item.content[0].text);
    } else if (item.type === "web_search_call") {
      this.showSearch(item);
      this.showFound(item);
    }
  }

  // Shows that the answer is being written, and for how long.
  begin() {
    this.steps.open = true;
    const started = Date.now();
    const tick = () => {
      const seconds = Math.round((Date.now() - started) / 1000);
      this.summary.textContent = `Working, ${seconds} s`;
    };
    tick();
    this.clock = setInterval(tick, 1000);
  }

  // Reads an event of the service; returns what to tell those who only listen.
  read(event) {
    const { output } = this.answer;
    const kind = event.type.replace("response.", "");
    const isSearch = event.item?.type === "web_search_call";
    if (kind === "reasoning_text.delta") {
      this.readReasoning(event.delta);
    } else if (kind === "anysearch.draft.delta") {
      this.answer.draft += event.delta;
      this.drafting ??= setTimeout(() => this.showDraft(), DRAFT_MILLISECONDS);
    } else if (kind === "output_item.added" && isSearch) {
      output.push(event.item);
      this.answer.draft = "";
      this.showDraft();
      this.showSearch(event.item);
      return `Searching for ${event.item.action.query}`;
    } else if (kind === "output_item.done" && isSearch) {
      output[output.length - 1] = event.item;
      this.showFound(event.item);
    } else if (["completed", "incomplete", "failed"].includes(kind)) {
      this.answer.response = event.response;
      this.answer.output = event.response.output;
      if (!messageOf(this.answer)) {
        const { reason } = event.response.anysearch;
        this.answer.problem = `No answer: ${reason}`;
      }
    } else if (kind === "error") {
      this.answer.problem = event.message;
    }
    return "";
  }

  readReasoning(delta) {
    const { output } = this.answer;
    if (output.at(-1)?.type !== "reasoning") {
      output.push({ type: "reasoning", content: [{ text: "" }] });
      this.beginReasoning();
    }
    output.at(-1).content[0].text += delta;
    this.reasoning.append(visible(delta));
  }

  showDraft() {
    clearTimeout(this.drafting);
    this.drafting = undefined;
    this.text.replaceChildren();
    addMarkdown(this.text, this.answer.draft);
  }

  beginReasoning(text = "") {
    this.reasoning = add(this.steps, "p", "reasoning", text);
    this.reasoning.dir = "auto";
  }

  showSearch(item) {
    const text = `Search ${this.searches + 1}: ${item.action.query}`;
    add(this.steps, "p", "search", text).dir = "auto";
  }

  showFound(item) {
    if (item.status === "completed") this.searches += 1;
    const list = add(this.steps, "ul", "passages");
    for (const passage of item.results ?? []) {
      if (passage.number) this.passages.set(passage.number, passage);
      addPassageButton(add(list, "li"), nameOf(passage), passage);
    }
    if (!item.results?.length) add(list, "li", "", "Nothing was found.");
    const left = count(
      this.answer.budget - this.searches,
      "search",
      "searches",
    );
    add(this.steps, "p", "note", `${left} left`);
  }

  // Shows the end of the answer: its text and sources, or the problem.
  end() {
    clearInterval(this.clock);
    this.showDraft();
    const { answer, card } = this;
    this.steps.open = false;
    const budget = count(answer.budget, "search", "searches");
    this.summary.textContent = `Steps: ${this.searches} of ${budget}`;
    this.steps.hidden = !answer.output.some((item) => item.type !== "message");
    const message = messageOf(answer);
    if (message) this.showText(message.text);
    const refused = answer.response?.anysearch.refused_citations ?? [];
    if (refused.length) {
      const numbers = refused.map((number) => `[${number}]`).join(", ");
      const removed = `${numbers}, which no search had shown: removed.`;
      add(card, "p", "problem", `It also cited ${removed}`);
    }
    if (answer.problem) {
      this.steps.open = true;
      add(card, "p", "problem", answer.problem);
    }
    this.showBar(Boolean(message));
  }

  showText(text) {
    this.text.replaceChildren();
    const citations = citationsOf(this.answer);
    const byNumber = new Map(citations.map((cited) => [cited.number, cited]));
    addMarkdown(this.text, text, (number, parent) => {
      const citation = byNumber.get(number);
      if (!citation) return false;
      this.addCitation(parent, `[${number}]`, citation, "cite");
      return true;
    });
    if (!citations.length) return;
    const list = add(this.card, "ul", "sources");
    for (const citation of citations)
      this.addCitation(add(list, "li"), nameOf(citation), citation, "");
  }

  addCitation(parent, text, citation, kind) {
    const passage = this.passages.get(citation.number);
    const source = addressOf(citation) ? { ...passage, ...citation } : passage;
    addPassageButton(parent, text, source ?? citation, kind);
  }

  showBar(hasText) {
    const { answer, card } = this;
    const bar = add(card, "div", "bar");
    if (answer.response) add(bar, "span", "note", costOf(answer));
    if (hasText || answer.draft) addCopyButton(bar, () => markdownOf(answer));
    if (answer.response) {
      addButton(bar, "Save as JSON", () => {
        const text = JSON.stringify(answer.response, null, 2);
        save(`${answer.response.id}.json`, "application/json", text);
      });
    }
    if (!hasText) addButton(bar, "Ask again", () => this.askAgain(this));
  }
}
