"use strict";
// Filters and draws the trajectories that stand as JSON in the page. Their text
// is nobody's code: it becomes text nodes, never markup.
(() => {
  const stored = document.getElementById("browser-data");
  if (!stored) return;
  const data = JSON.parse(stored.textContent);
  const root = document.querySelector(".browser");
  const at = (name) => root.querySelector(`[data-part="${name}"]`);
  const filters = ["row", "dataset", "budget", "outcome", "em"].map(at);
  const search = at("text"), shade = at("shade"), list = at("list");
  const detail = at("detail"), status = at("status"), told = at("told");
  const shadeNote = at("shade-note"), more = at("more");
  const PAGE = 60;
  let shown = [], limit = PAGE, current = null;

  const make = (tag, properties = {}, ...children) => {
    const node = Object.assign(document.createElement(tag), properties);
    node.append(...children);
    return node;
  };
  const number = (value, digits = 3) =>
    value === null || value === undefined ? "–"
      : value.toFixed(digits).replace("-", "−");
  const plural = (n, one, many) => `${n} ${n === 1 ? one : many}`;
  const verdict = (e) => (e.em ? "right" : "wrong");
  // A row has its colour and marker of the report.
  const mark = (row) => {
    const [glyph, color] = data.marks[row] || ["", 0];
    return make("span", { className: "mark", ariaHidden: "true",
      textContent: glyph, style: `color: var(--series-${color})` });
  };
  const key = (e) => [e.question_id, e.budget, e.seed].join("\u0000");

  // Each trajectory's text once, for the search field.
  const texts = data.entries.map((e) =>
    [e.question, e.answer, ...e.golden_answers,
     ...(e.tokens ? e.tokens.texts.map((i) => data.vocabulary[i])
       : e.pieces.map((p) => p[1]))].join(
      e.tokens ? "" : " ").toLowerCase());
  const twins = new Map();
  for (const e of data.entries) {
    if (!e.training) twins.set(key(e), [...(twins.get(key(e)) || []), e]);
  }

  const fill = (select, name) => {
    const values = [...new Set(data.entries.map((e) => e[name]))];
    values.sort((a, b) => (a > b ? 1 : a < b ? -1 : 0));
    for (const value of values) {
      const text = name === "row" ? data.rows[value]
        : name === "em" ? (value ? "right" : "wrong") : String(value);
      select.append(make("option", { value: String(value), textContent: text }));
    }
  };
  filters.forEach((select) => fill(select, select.dataset.part));

  const apply = () => {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    shown = data.entries.filter((e, i) =>
      filters.every((f) => !f.value || String(e[f.dataset.part]) === f.value) &&
      words.every((w) => texts[i].includes(w)));
    limit = PAGE;
    drawList();
    if (!shown.includes(current)) open(shown[0] || null);
  };

  const drawList = () => {
    status.textContent =
      `${shown.length} of ${plural(data.entries.length, "trajectory",
        "trajectories")}`;
    list.replaceChildren(...shown.slice(0, limit).map((e) => {
      const button = make("button", { type: "button", dir: "auto" },
        mark(e.row), " ",
        make("span", { textContent: e.question || "(no question)" }),
        make("small", { textContent:
          `${data.rows[e.row]} · B = ${e.budget} · ` +
          `${plural(e.searches, "search", "searches")} · ` +
          (e.outcome === "answered" ? verdict(e) : e.outcome) }));
      button.setAttribute("aria-current", e === current ? "true" : "false");
      button.addEventListener("click", () => {
        open(e);
        if (detail.getBoundingClientRect().top > innerHeight * 0.7) {
          detail.scrollIntoView();
        }
      });
      return make("li", {}, button);
    }));
    more.hidden = shown.length <= limit;
  };

  const step = (by) => {
    const i = shown.indexOf(current) + by;
    if (i < 0 || i >= shown.length) return;
    open(shown[i]);
  };

  const open = (e) => {
    current = e;
    const position = shown.indexOf(e);
    if (position >= limit) {
      limit = position + PAGE;
      drawList();
    }
    list.querySelectorAll("button").forEach((b, i) => {
      b.setAttribute("aria-current", i === position ? "true" : "false");
      const top = b.offsetTop - list.scrollTop;
      if (i === position &&
          (top < 0 || top + b.offsetHeight > list.clientHeight)) {
        list.scrollTop = b.offsetTop;
      }
    });
    told.textContent = "";
    if (!e) {
      detail.replaceChildren(make("p", { className: "muted",
        textContent: "No trajectory passes the filter." }));
      shadeNote.textContent = "";
      return;
    }
    const facts = [
      data.rows[e.row], e.dataset, `B = ${e.budget}`, `seed ${e.seed}`,
      plural(e.searches, "search", "searches"), e.outcome + (e.reason ?
        ` (${e.reason})` : ""),
      `${e.generated_tokens} tokens written, ${e.retrieved_tokens} read`];
    if (e.format !== null) {
      facts.push(e.format ? "well formed" : "badly formed");
    }
    if (e.violation) facts.push("searched beyond its budget");
    if (e.cost) facts.push(`$${e.cost.toPrecision(3)}`);
    if (e.hops) facts.push(plural(e.hops, "hop", "hops"));
    if (e.training) {
      facts[3] = `rollout ${e.seed}`;
      facts.push(`reward ${number(e.reward)}`);
      if (e.advantage !== undefined) {
        facts.push(`advantage ${number(e.advantage)}`);
      }
    }
    const others = (twins.get(key(e)) || []).filter((o) => o !== e);
    const links = others.map((o) => {
      const b = make("button", { type: "button" }, mark(o.row),
        ` ${data.rows[o.row]} (${verdict(o)})`);
      b.addEventListener("click", () => open(o));
      return b;
    });
    const body = make("div", { className: "response" }, ...response(e, others));
    body.tabIndex = 0;
    body.setAttribute("role", "region");
    body.setAttribute("aria-label", "Response");
    detail.replaceChildren(
      make("h3", { textContent: e.question, dir: "auto" }),
      make("p", { className: "muted" }, mark(e.row), ` ${facts.join(" · ")}`),
      make("p", { dir: "auto" }, "Answer: ",
        make("b", { textContent: e.answer === null ? "none" : e.answer }),
        `, ${verdict(e)}. Accepted: ${e.golden_answers.join("; ")}`),
      ...(links.length ? [make("p", { className: "others" },
        "The same episode by ", ...links)] : []),
      ...(e.prompt ? [make("details", {}, make("summary",
        { textContent: "Prompt" }), make("pre", { textContent: e.prompt,
          dir: "auto" }))] : []),
      body,
      ...(e.sources.length ? [make("p", { className: "muted",
        textContent: "Passages shown:" }), make("ol", {}, ...e.sources.map(
        (place) => make("li", { textContent: place, dir: "auto" })))] : []));
  };

  // What a colouring says of each written token, and how strongly.
  const values = (e, others) => {
    const mode = shade.value;
    if (mode === "advantage") {
      if (e.advantage === undefined) {
        return [null, "No advantage within a group: rows of GRPO trainings have them."];
      }
      return [() => e.advantage, "Advantage of the whole trajectory within " +
        "its group: blue pushes it up, orange (underlined) down.", 2];
    }
    if (mode === "author") return [null, ""];
    if (!e.tokens || !e.tokens.logps) {
      return [null, "This row was stored without token log-probabilities."];
    }
    if (mode === "logp") {
      return [(i) => e.tokens.logps[i], "Log-probability under the policy " +
        "that wrote the token: the more orange (underlined), the less likely.",
      4];
    }
    const other = others.find((o) => o.tokens && o.tokens.logps);
    if (!other) return [null, "No other row has this episode with tokens."];
    const same = e.tokens.texts.findIndex((t, i) =>
      t !== other.tokens.texts[i]);
    const until = same < 0 ? e.tokens.texts.length : same;
    return [(i, place) => place < until
      ? e.tokens.logps[i] - other.tokens.logps[i] : null,
    `Log-probability here minus ${data.rows[other.row]}'s, as far as both ` +
      `wrote the same (${until} tokens of the response): blue likelier ` +
      "here, orange (underlined) there.", 2];
  };

  const response = (e, others) => {
    const [value, note, scale] = values(e, others);
    shadeNote.textContent = note;
    const pieces = [];
    const piece = (author) => {
      const text = make("span", { className: "text", dir: "auto" });
      pieces.push(make("div", { className: `piece ${author}` },
        make("span", { className: "who", textContent: author }), text));
      return text;
    };
    if (!e.tokens) {
      for (const [author, text] of e.pieces) {
        const part = make("span", { textContent: text.trim() });
        if (author === "model" && value) tint(part, value(0, 0), scale);
        piece(author).append(part);
      }
      return pieces.length ? pieces : [make("p", { className: "muted",
        textContent: "Nothing was written." })];
    }
    let place = 0, written = 0;
    for (const [author, count] of e.tokens.authors) {
      const box = piece(author);
      for (let n = 0; n < count; n++, place++) {
        const text = data.vocabulary[e.tokens.texts[place]];
        if (author !== "model") {
          box.append(text);
          continue;
        }
        const token = make("span", { className: "token", textContent: text });
        token.dataset.model = String(written);
        token.dataset.place = String(place);
        if (value) tint(token, value(written, place), scale);
        box.append(token);
        written++;
      }
    }
    return pieces;
  };

  const tint = (node, value, scale) => {
    if (value === null || value === undefined || !value) return;
    node.classList.add(value > 0 ? "up" : "down");
    const strength = Math.min(1, Math.abs(value) / scale);
    node.style.setProperty("--strength", `${Math.round(strength * 60)}%`);
  };

  // What is known of one token, told on hover and on touch.
  const tell = (event) => {
    const token = event.target.closest(".token");
    if (!token || !current || !current.tokens.logps) return;
    const i = Number(token.dataset.model);
    const logp = current.tokens.logps[i];
    let left = i, version = null;
    for (const [v, count] of current.tokens.versions || []) {
      if (left < count) { version = v; break; }
      left -= count;
    }
    told.textContent = `“${token.textContent}”: log-probability ` +
      `${number(logp, 3)}, probability ${number(Math.exp(logp), 3)}` +
      (version === null ? "" : `, policy version ${version}`);
  };
  detail.addEventListener("pointerover", tell);
  detail.addEventListener("click", tell);

  filters.forEach((f) => f.addEventListener("change", apply));
  search.addEventListener("input", apply);
  shade.addEventListener("change", () => open(current));
  more.addEventListener("click", () => { limit += PAGE; drawList(); });
  at("previous").addEventListener("click", () => step(-1));
  at("next").addEventListener("click", () => step(1));
  root.hidden = false;
  // The first to be read has several searches and an answer.
  const worth = (e) => 4 * Math.min(e.searches, 3) +
    2 * (e.outcome === "answered") + (e.em ? 1 : 0);
  const best = data.entries.reduce((a, b) => worth(b) > worth(a) ? b : a,
    data.entries[0]);
  apply();
  if (best) open(best);
})();
