// Asks this service and shows the episode as it streams. Texts of questions,
// passages and policies are written as text only, never as markup.
"use strict";

const $ = (id) => document.getElementById(id);
let running = null; // The AbortController of the question under way.
let most = 10;
let asked = 0; // Episodes so far, which name the passages of each.

function add(parent, tag, kind, text) {
  const made = document.createElement(tag);
  if (kind) made.className = kind;
  if (text !== undefined) made.textContent = text;
  parent.append(made);
  return made;
}

const count = (n, one, more) => `${n} ${n === 1 ? one : more}`;

async function refusal(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `The service answered ${response.status}.`;
  }
}

// Yields the JSON of each server-sent event.
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const parts = (rest + value).split("\n\n");
      rest = parts.pop();
      for (const part of parts) {
        const line = part.split("\n").find((l) => l.startsWith("data: "));
        if (line) yield JSON.parse(line.slice(6));
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

// What a passage is called: its number if it has one, title, path, page, heading.
function name(passage) {
  const { path, page, heading } = passage.source || {};
  const number = passage.number ? `[${passage.number}] ` : "";
  const title = passage.title || (path ? "" : passage.id);
  const shown = title.replace(/^"|"$/g, "");
  const below = heading && heading.replace(`${shown} > `, "");
  const place = [shown, path, page && `page ${page}`, below];
  return number + [...new Set(place.filter(Boolean))].join(" · ");
}

// One answer. Beside others, its steps fold when it is there.
class Episode {
  constructor(budget, folds) {
    this.name = `e${(asked += 1)}`;
    this.folds = folds;
    this.budget = budget;
    this.used = 0;
    this.thinking = null;
    this.card = add($("episodes"), "article");
    add(this.card, "h2", "", `Budget ${budget}`);
    this.steps = add(this.card, "details", "steps");
    this.steps.open = true;
    add(this.steps, "summary", "", "Steps");
    this.left();
  }

  left() {
    const left = this.budget - this.used;
    add(this.steps, "p", "left", `${count(left, "search", "searches")} left`);
  }

  problem(text) {
    add(this.card, "p", "problem", text);
  }

  passages(item) {
    for (const passage of item.results || []) {
      const details = add(this.steps, "details");
      const id = `${this.name}-${passage.number}`;
      if (passage.number && !$(id)) details.id = id;
      const line = passage.number
        ? name(passage)
        : `${name(passage)}: ${passage.text}`;
      const cut = line.length > 70 ? `${line.slice(0, 70)}...` : line;
      add(details, "summary", "", passage.number ? line : cut);
      add(details, "p", "", passage.text.replace(/\n\s*\n/g, "\n"));
    }
    if (!(item.results || []).length)
      add(this.steps, "p", "left", "no results");
  }

  // Writes an answer, in which each citation opens its passage.
  answer(part) {
    const line = add(this.card, "p", "answer", "");
    let end = 0;
    for (const cited of part.annotations.filter((a) => a.number)) {
      line.append(part.text.slice(end, cited.start_index));
      end = cited.end_index;
      const link = add(line, "a", "", part.text.slice(cited.start_index, end));
      const passage = `${this.name}-${cited.number}`;
      link.href = `#${passage}`;
      if (/^https?:/.test(cited.url)) {
        link.href = cited.url;
        link.target = "_blank";
        link.rel = "noopener noreferrer";
      }
      link.title = cited.title;
      link.addEventListener("click", () => {
        this.steps.open = $(passage).open = true;
      });
    }
    line.append(part.text.slice(end));
  }

  show(event) {
    const kind = event.type.replace("response.", "");
    if (kind === "reasoning_text.delta") {
      this.thinking ||= add(this.steps, "p", "thinking", "");
      this.thinking.textContent += event.delta;
    } else if (kind === "output_item.added") {
      this.thinking = null;
      if (event.item.type === "web_search_call") {
        const number = this.used + 1;
        const query = event.item.action.query;
        add(this.steps, "p", "search", `search ${number}: ${query}`);
      }
    } else if (kind === "output_item.done") {
      if (event.item.type === "web_search_call") {
        this.used += event.item.status === "completed" ? 1 : 0;
        this.passages(event.item);
        this.left();
      }
    } else if (["completed", "incomplete", "failed"].includes(kind)) {
      this.end(event.response);
    } else if (kind === "error") {
      this.problem(event.message);
    }
  }

  end(response) {
    this.steps.open = !this.folds;
    const told = response.anysearch;
    const message = response.output.find((item) => item.type === "message");
    if (message) {
      this.answer(message.content[0]);
    } else {
      this.problem(`No answer: ${told.reason}`);
    }
    const refused = (told.refused_citations || []).map((n) => `[${n}]`);
    if (refused.length) {
      const cited = refused.join(", ");
      this.problem(
        `It also cited ${cited}, which no search had shown: removed.`,
      );
    }
    const cost = [
      count(told.searches, "search", "searches"),
      count(response.usage.output_tokens, "token", "tokens"),
      `${told.seconds.toFixed(1)} s`,
    ];
    const line = add(this.card, "p", "left", `${cost.join(", ")} · `);
    const text = JSON.stringify(response, null, 2);
    const link = add(line, "a", "", "trajectory as JSON");
    link.href = URL.createObjectURL(
      new Blob([text], { type: "application/json" }),
    );
    link.download = `${response.id}.json`;
  }
}

// A key may ask only so much at a time: what is refused for that alone is asked
// again when the service says so.
async function admitted(url, request) {
  for (;;) {
    const response = await fetch(url, request);
    if (response.status !== 429) return response;
    const told = await response.clone().json();
    if (told.error.code !== "rate_limit_exceeded") return response;
    const seconds = Number(response.headers.get("retry-after")) || 1;
    await new Promise((done) => setTimeout(done, 1000 * seconds));
    request.signal.throwIfAborted();
  }
}

async function ask(question, budget, signal, folds) {
  const episode = new Episode(budget, folds);
  const headers = { "content-type": "application/json" };
  if ($("key").value) headers.authorization = `Bearer ${$("key").value}`;
  try {
    const response = await admitted("v1/responses", {
      method: "POST",
      headers,
      signal,
      body: JSON.stringify({
        input: question,
        max_tool_calls: budget,
        stream: true,
      }),
    });
    if (response.status === 401) $("locked").hidden = false;
    if (!response.ok) {
      episode.steps.remove();
      episode.problem(await refusal(response));
      return;
    }
    for await (const event of events(response.body)) episode.show(event);
  } catch (error) {
    episode.problem(
      signal.aborted ? "Stopped." : `The service is gone: ${error.message}`,
    );
  }
}

async function start(budgets) {
  const question = $("question").value.trim();
  if (!question) {
    $("question").focus();
    return;
  }
  if (running) running.abort();
  const mine = (running = new AbortController());
  for (const link of document.querySelectorAll("a[download]")) {
    URL.revokeObjectURL(link.href);
  }
  $("episodes").replaceChildren();
  $("stop").disabled = false;
  const many = budgets.length > 1;
  await Promise.all(budgets.map((b) => ask(question, b, mine.signal, many)));
  if (running === mine) {
    running = null;
    $("stop").disabled = true;
  }
}

const every = () => [0, 1, 2, 3, 5, 8].filter((budget) => budget <= most);

$("form").addEventListener("submit", (event) => {
  event.preventDefault();
  start([Number($("budget").value)]);
});
$("every").addEventListener("click", () => start(every()));
$("stop").addEventListener("click", () => running && running.abort());
$("budget").addEventListener("input", () => {
  $("shown").textContent = $("budget").value;
});
$("question").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey) {
    event.preventDefault();
    $("form").requestSubmit();
  }
});

async function begin() {
  const health = await (await fetch("health")).json();
  most = health.max_budget;
  $("model").textContent = health.model;
  $("held").hidden = !health.passages;
  const held = health.passages.toLocaleString("en");
  $("passages").textContent = health.passages === 1 ? "1 passage" : `${held} passages`;
  $("budget").max = most;
  $("budget").value = Math.min(3, most);
  $("shown").textContent = $("budget").value;
  $("locked").hidden = !health.keys;
  const examples = await (await fetch("examples")).json();
  $("examples").hidden = !examples.length;
  for (const example of examples.slice(0, 12)) {
    const button = add(add($("list"), "li"), "button", "", example);
    button.type = "button";
    button.addEventListener("click", () => {
      $("question").value = example;
      start([Number($("budget").value)]);
    });
  }
}
begin();
