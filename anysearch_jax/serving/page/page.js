// The page: asks this service, and shows the conversation.
//
// Texts of questions, passages and models are not trusted: elements.js writes
// them as text, markdown.js as elements of its own.
import { AnswerView } from "./answer.js";
import { Conversation, messageOf, newAnswer } from "./conversation.js";
import { add, addButton, byId, count, save } from "./elements.js";
import { Refusal, answerEvents, get } from "./service.js";
import * as source from "./source.js";

const COMPARED = [0, 1, 2, 3, 5, 8];
const MOST_EXAMPLES = 12;
const DEFAULT_BUDGET = 3;

const conversation = new Conversation();
let health = null; // What the service says of itself.
let running = null; // The AbortController of the answers under way.

const say = (text) => text && (byId("status").textContent = text);
const hint = (text) => (byId("hint").textContent = text);

function showTurn(turn) {
  byId("intro").hidden = true;
  byId("export").hidden = byId("clear").hidden = false;
  const article = add(byId("conversation"), "article");
  add(article, "h2", "", turn.question).dir = "auto";
  const replies = add(article, "div", "replies");
  const isCompared = turn.answers.length > 1;
  article.classList.toggle("compared", isCompared);
  return turn.answers.map((answer) => {
    const again = (view) => askAgain(turn, view);
    return new AnswerView(replies, answer, isCompared, again);
  });
}

function showConversation() {
  byId("conversation").replaceChildren();
  for (const turn of conversation.turns) {
    for (const answer of turn.answers)
      if (!answer.response && !answer.problem)
        answer.problem = "The page was left before the answer came.";
    for (const view of showTurn(turn)) view.end();
  }
}

// Asks for an answer of a turn, and shows it while it comes.
async function fill(turn, view, signal) {
  const { answer } = view;
  const most = health.history_characters;
  const { messages, leftOut } = conversation.messages(turn, most);
  if (leftOut && most) {
    const note = add(view.card, "p", "note");
    note.textContent =
      count(leftOut, "question is", "questions are") +
      " left out of the conversation: the model has no room for more.";
    view.card.prepend(note);
  }
  view.begin();
  try {
    const key = byId("key").value;
    const events = answerEvents(messages, answer.budget, key, signal);
    for await (const event of events) say(view.read(event));
    if (!answer.response && !answer.problem)
      answer.problem = "The service ended before the answer did.";
  } catch (error) {
    answer.problem = problemOf(error, signal);
    if (error.needsKey) byId("locked").hidden = false;
  }
  view.end();
  say(messageOf(answer)?.text ?? answer.problem);
}

function problemOf(error, signal) {
  if (signal.aborted) return "Stopped.";
  if (error instanceof Refusal) return error.message;
  return `The service is gone: ${error.message}`;
}

async function run(turn, views) {
  running = new AbortController();
  showRunning();
  const { signal } = running;
  await Promise.all(views.map((view) => fill(turn, view, signal)));
  running = null;
  showRunning();
  store();
}

function store() {
  const lost = conversation.store();
  if (!lost) return;
  const questions = count(lost, "question", "questions");
  hint(
    `The browser has no room for the oldest ${questions}: export them before ` +
      "you leave this page.",
  );
}

function showRunning() {
  const hadFocus = [byId("ask"), byId("stop")].includes(document.activeElement);
  byId("ask").hidden = Boolean(running);
  byId("stop").hidden = !running;
  byId("every").disabled = Boolean(running);
  if (hadFocus) byId("question").focus();
}

function askAgain(turn, view) {
  if (isBusy()) return;
  const place = turn.answers.indexOf(view.answer);
  const answer = newAnswer(view.answer.budget);
  turn.answers[place] = answer;
  const next = new AnswerView(
    view.card.parentElement,
    answer,
    turn.answers.length > 1,
    (failed) => askAgain(turn, failed),
  );
  view.card.replaceWith(next.card);
  byId("question").focus();
  run(turn, [next]);
}

// Returns whether an answer is being written, and says so.
function isBusy() {
  if (running) hint("An answer is being written: Esc stops it.");
  return Boolean(running);
}

function ask(budgets) {
  const field = byId("question");
  const question = field.value.trim();
  field.focus();
  if (!question || isBusy() || isTooLong(question)) return;
  field.value = "";
  readTyped();
  const turn = conversation.add(question, budgets);
  const views = showTurn(turn);
  byId("conversation").lastElementChild.scrollIntoView();
  run(turn, views);
}

// Returns whether the service would refuse a question for its length, and says
// so. It counts characters, JavaScript's strings their halves.
function isTooLong(question) {
  const most = health.max_characters;
  const characters = question.length > most ? [...question].length : 0;
  if (characters <= most) return false;
  hint(
    `Found ${characters.toLocaleString("en")} characters, expected at most ` +
      `${most.toLocaleString("en")}: shorten the question by ` +
      `${(characters - most).toLocaleString("en")}.`,
  );
  return true;
}

// Fits the field to what is typed, and says if that is too long.
function readTyped() {
  const field = byId("question");
  field.style.height = "auto";
  const borders = field.offsetHeight - field.clientHeight;
  field.style.height = `${field.scrollHeight + borders}px`;
  if (!isTooLong(field.value.trim())) hint("");
}

function clear() {
  running?.abort();
  const { turns } = conversation;
  conversation.clear();
  showConversation();
  byId("intro").hidden = false;
  byId("export").hidden = byId("clear").hidden = true;
  source.close();
  hint("The conversation is cleared. ");
  addButton(byId("hint"), "Undo", () => {
    conversation.turns = [...turns, ...conversation.turns];
    showConversation();
    hint("");
    store();
  });
  byId("question").focus();
}

function readKey(event) {
  if (event.key !== "Escape") return;
  const isInSource = byId("source").contains(document.activeElement);
  if (isInSource || !running) source.close();
  else running.abort();
}

function showBudget(budget) {
  byId("budget").value = byId("shown").textContent = budget;
}

byId("form").addEventListener("submit", (event) => {
  event.preventDefault();
  ask([Number(byId("budget").value)]);
});
byId("question").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  byId("form").requestSubmit();
});
byId("question").addEventListener("input", readTyped);
byId("every").addEventListener("click", () =>
  ask(COMPARED.filter((budget) => budget <= health.max_budget)),
);
byId("stop").addEventListener("click", () => running?.abort());
byId("budget").addEventListener("input", () =>
  showBudget(byId("budget").value),
);
byId("clear").addEventListener("click", clear);
byId("close").addEventListener("click", source.close);
byId("export").addEventListener("click", () => {
  const text = conversation.markdown(health.model);
  save("conversation.md", "text/markdown", text);
});
document.addEventListener("keydown", readKey);
addEventListener("pagehide", () => conversation.store());

async function begin() {
  health = await get("health");
  byId("model").textContent = health.model;
  byId("held").hidden = !health.passages;
  byId("passages").textContent = count(health.passages, "passage", "passages");
  byId("budget").max = health.max_budget;
  const last = conversation.turns.findLast((turn) => turn.answers.length === 1);
  const budget = last?.answers[0].budget ?? DEFAULT_BUDGET;
  showBudget(Math.min(budget, health.max_budget));
  byId("locked").hidden = !health.keys;
  byId("follow").hidden = !health.history_characters;
  showConversation();
  const examples = await get("examples");
  byId("examples").hidden = !examples.length;
  for (const example of examples.slice(0, MOST_EXAMPLES)) {
    addButton(add(byId("list"), "li"), example, () => {
      byId("question").value = example;
      byId("form").requestSubmit();
    });
  }
}
begin();
