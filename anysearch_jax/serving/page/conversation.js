// The conversation: its turns, kept in the tab until it is closed or cleared.
//
// A turn has a `question` and an answer for each budget:
//   budget     how many searches it may cost
//   output     what came so far, as items of the Responses API
//   draft      what is written of its text so far
//   response   the whole response; null before its end
//   problem    why there is no answer, a sentence; "" without a problem
import { count } from "./elements.js";
import { nameOf } from "./source.js";

const STORED = "anysearch.conversation";

export function newAnswer(budget) {
  return { budget, output: [], draft: "", response: null, problem: "" };
}

// Returns the text of an answer with its citations; undefined without one.
export function messageOf(answer) {
  return answer.output.find((item) => item.type === "message")?.content[0];
}

// Returns the citations of an answer, one for each number.
export function citationsOf(answer) {
  const byNumber = new Map();
  for (const citation of messageOf(answer)?.annotations ?? [])
    if (citation.number) byNumber.set(citation.number, citation);
  return [...byNumber.values()];
}

// Returns what an answer cost, in words.
export function costOf(answer) {
  const { anysearch, usage } = answer.response;
  const searches = count(answer.budget, "search", "searches");
  return [
    `${anysearch.searches} of ${searches}`,
    count(usage.output_tokens, "token", "tokens"),
    `${anysearch.seconds.toFixed(1)} s`,
  ].join(" · ");
}

// Returns an answer as Markdown, with its sources.
export function markdownOf(answer) {
  const citations = citationsOf(answer);
  const sources = citations.map((citation) => {
    const address = citation.url.startsWith("urn:") ? "" : citation.url;
    const place = address && ` <${new URL(address, document.baseURI)}>`;
    return `- ${nameOf(citation)}${place}`;
  });
  const problem = answer.problem || "The answer is being written.";
  const draft = [answer.draft, `(${problem})`].filter(Boolean).join("\n\n");
  const text = messageOf(answer)?.text ?? draft;
  return [text, sources.join("\n")].filter(Boolean).join("\n\n");
}

export class Conversation {
  constructor() {
    this.turns = stored();
  }

  add(question, budgets) {
    const turn = { question, answers: budgets.map(newAnswer) };
    this.turns.push(turn);
    return turn;
  }

  clear() {
    this.turns = [];
    this.store();
  }

  // Returns the messages that ask a turn's question after those before it, and
  // how many of those are left out: together they have `most` characters.
  messages(turn, most) {
    const earlier = this.turns.slice(0, this.turns.indexOf(turn));
    const pairs = earlier.flatMap(({ question, answers }) => {
      const texts = answers.map((answer) => messageOf(answer)?.text);
      const text = texts.findLast(Boolean);
      return text ? [[question, text]] : [];
    });
    let characters = turn.question.length + pairs.flat().join("").length;
    let leftOut = 0;
    while (leftOut < pairs.length && characters > most) {
      characters -= pairs[leftOut].join("").length;
      leftOut += 1;
    }
    const messages = pairs.slice(leftOut).flatMap(([question, text]) => [
      { role: "user", content: question },
      { role: "assistant", content: text },
    ]);
    messages.push({ role: "user", content: turn.question });
    return { messages, leftOut };
  }

  // Stores the turns; returns how many of the oldest had no room.
  store() {
    for (let first = 0; first <= this.turns.length; first += 1) {
      try {
        const turns = this.turns.slice(first);
        sessionStorage.setItem(STORED, JSON.stringify(turns));
        return first;
      } catch {
        continue; // The browser's limit, about five million characters.
      }
    }
    return this.turns.length;
  }

  // Returns the conversation as a Markdown file.
  markdown(model) {
    const turns = this.turns.map(({ question, answers }, index) => {
      const quoted = question.replace(/^/gm, "> ");
      const texts = answers.map((answer) => {
        const cost = answer.response ? `\n\n*${costOf(answer)}*` : "";
        return markdownOf(answer) + cost;
      });
      return `## Question ${index + 1}\n\n${quoted}\n\n${texts.join("\n\n")}`;
    });
    const day = new Date().toLocaleDateString("sv"); // 2026-11-29
    return [`# Conversation with ${model}, ${day}`, ...turns, ""].join("\n\n");
  }
}

function stored() {
  try {
    return JSON.parse(sessionStorage.getItem(STORED)) ?? [];
  } catch {
    return []; // The browser stores nothing for this page.
  }
}
