"""An artificial study: episodes of rows with a known policy, from a seed."""

from __future__ import annotations

import json
import pathlib
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from anysearch_jax.evaluation import metrics
from anysearch_jax.report import page, study_tables, trajectories
from anysearch_jax.report import study as study_lib

WORDS: list[str] = []  # Texts of the tokens of all rows made so far.
HOSTILE = (
  "</span></div><script>alert('x')</script> <img src=x onerror=alert(1)> "
  '{{ 7*7 }} $\\frac{1}{2}$ \u202e \ud800 &amp; "quoted"'
)


def row(
  label: str,
  *,
  skill: float = 0.7,
  thrift: float = 0.1,
  budgets: tuple[int, ...] = tuple(range(9)),
  questions: int = 60,
  seeds: tuple[int, ...] = (42,),
  scaffold: bool = False,
  plain: bool = False,
) -> metrics.Row:
  """Makes a row whose policy searches a known fact with probability `thrift`.

  With `plain`, episodes look like those of real questions, without metadata or
  tokens.
  """
  episodes = [
    _episode(label, question, budget, seed, skill, thrift, scaffold)
    for question in range(questions)
    for budget in budgets
    for seed in seeds
  ]
  if plain:
    episodes = [
      {k: v for k, v in e.items() if k != "tokens"} | {"metadata": {}}
      for e in episodes
    ]
  return metrics.Row(label, tuple(episodes))


def trained(
  label: str, trainings: int, *, seeds: tuple[int, ...] = (), **size: Any
) -> metrics.Row:
  """Makes a row of trainings with `seeds`, by default one each of its own."""
  return metrics.Row(
    label,
    tuple(
      e | {"run": f"{label}{i}"}
      for i in range(trainings)
      for e in row(f"{label}{i}", seeds=seeds or (i,), **size).episodes
    ),
  )


def _episode(
  label: str,
  question: int,
  budget: int,
  seed: int,
  skill: float,
  thrift: float,
  scaffold: bool,
) -> dict[str, Any]:
  shape = np.random.default_rng(question)
  rng = np.random.default_rng([question, budget, seed, *label.encode()])
  hops = 1 + question % 4
  facts = [
    {
      "entity": f"kel{question}x{hop}",
      "relation": "birthplace",
      "alternative": "born",
      "value": f"kel{question}x{hop + 1}",
      "known": bool(shape.random() < 0.5),
      "stale": bool(shape.random() < 0.1),
      "contradicted": bool(shape.random() < 0.2),
    }
    for hop in range(hops)
  ]
  spans, queries, right = [], [], True
  for fact in facts:
    wants = rng.random() < (thrift if fact["known"] else 0.95)
    if wants and len(queries) < budget:
      query = f"{fact['entity']} birthplace"
      if rng.random() < 0.1:
        query = f"verdict {fact['entity']} birthplace {fact['value']}"
      queries.append(query)
      spans += [
        ("model", f"<think> need {query} </think><search>{query}</search>"),
        (
          "environment",
          f"\n\n<information>Doc 1(Title: {fact['entity']}) {fact['value']}"
          "</information>\n\n",
        ),
      ]
      right &= rng.random() < 0.5 + skill / 2
    else:
      right &= rng.random() < (skill if fact["known"] else 0.1)
  violation = bool(budget < 2 and rng.random() < 0.1)
  if violation:
    spans += [
      ("model", "<search>one more</search>"),
      ("environment", "\nNo search is left; answer now.\n"),
    ]
  outcome = rng.choice(
    ["answered", "invalid", "truncated", "failed"], p=[0.95, 0.02, 0.02, 0.01]
  )
  answered = outcome == "answered"
  answer = facts[-1]["value"] if right else "marn"
  if answered:
    spans.append(("model", f"<think> so </think><answer>{answer}</answer>"))
  generated = 10 + 12 * len(queries)
  return {
    "question_id": f"q{question}",
    "question": f"question kel{question}x0 {'birthplace ' * hops}?",
    "golden_answers": [facts[-1]["value"]],
    "budget": budget,
    "scaffold": scaffold,
    "seed": seed,
    "spans": [{"author": a, "text": t} for a, t in spans],
    "tokens": _tokens(spans, rng),
    "answer": answer if answered else None,
    "em": int(answered and right),
    "format": int(answered and not violation),
    "searches": len(queries),
    "queries": queries,
    "violation": violation,
    "outcome": str(outcome),
    "reason": "" if answered else "a limit",
    "generated_tokens": generated,
    "retrieved_tokens": 20 * len(queries),
    "total_tokens": generated + 20 * len(queries),
    "metadata": {"hops": hops, "min_searches": 0, "facts": facts},
  }


def _tokens(
  spans: list[tuple[str, str]], rng: np.random.Generator
) -> dict[str, Any]:
  """Encodes words as tokens after a prompt of two; ids index `WORDS`."""
  ids, authors = [_id("a "), _id("prompt ")], [["prompt", 2]]
  for author, text in spans:
    words = [_id(word) for word in re.findall(r"\S+\s*|\s+", text)]
    ids += words
    authors.append([author, len(words)])
  written = sum(count for author, count in authors if author == "model")
  return {
    "ids": ids,
    "authors": authors,
    "logps": [round(float(x), 5) for x in -rng.exponential(size=written)],
    "versions": [[3, written]],
  }


def _id(word: str) -> int:
  if word not in WORDS:
    WORDS.append(word)
  return WORDS.index(word)


def decode(ids: Sequence[int]) -> str:
  """Decodes the ids of an artificial episode."""
  return "".join(WORDS[i] for i in ids)


def training(
  label: str, *, tool: float = 0.3, rollouts: int = 60, seed: int = 0
) -> study_lib.Training:
  rng = np.random.default_rng(seed)
  records = []
  for rollout in range(rollouts):
    done = rollout / rollouts
    phase = 1 if rollout < rollouts // 5 else 2
    p = (
      np.eye(5)[4 - rollout * 5 // (rollouts // 5)]
      if phase == 1
      else np.array([0.2] * 5)
      + done * np.array([0.2, 0.0, -0.05, -0.07, -0.08])
    )
    records.append(
      {
        "rollout": rollout,
        "step": rollout * 5,
        "phase": phase,
        "scaffold": phase == 1,
        **{f"curriculum/p{b + 1}": float(p[b]) for b in range(5)},
        **{
          f"curriculum/count{b + 1}": int(n)
          for b, n in enumerate(rng.multinomial(32, p))
        },
        "reward/total": 0.3 + 0.4 * done + rng.normal(0, 0.05),
        "reward/em": 0.4 + 0.3 * done + rng.normal(0, 0.05),
        "engine/server/a:1/fingerprint": 0.01,
        "reward/format": 0.9,
        "reward/tool": tool * done,
        "loss/kl": 0.01 * done,
        "policy/entropy": 0.3 - 0.2 * done + rng.normal(0, 0.01),
        "rollout/generated_tokens": 60 - 10 * done,
        "time/rollout": 2.0,
        "time/train": 3.0,
        "rollout/failed": 0,
      }
    )
  config = {
    "name": label,
    "reward": {"gamma_max": tool, "alpha": 0.5},
    "curriculum": {"max_budget": 5, "fixed_budget": -1},
  }
  return study_lib.Training(label, tuple(records), config)


def save_row(row: metrics.Row, folder: pathlib.Path) -> None:
  folder.mkdir(parents=True)
  lines = "".join(json.dumps(episode) + "\n" for episode in row.episodes)
  (folder / "episodes.jsonl").write_text(lines, "utf-8")


def save_training(run: study_lib.Training, folder: pathlib.Path) -> None:
  folder.mkdir(parents=True, exist_ok=True)
  lines = "".join(json.dumps(record) + "\n" for record in run.records)
  (folder / "metrics.jsonl").write_text(lines, "utf-8")
  (folder / "config.json").write_text(json.dumps(run.config), "utf-8")


def told(*measured: Any, **options: Any) -> dict[str, Any]:
  """Returns the data of a report; arguments as for `study.measure`."""
  found = study_lib.measure(*measured, **options)
  return page.data(found, study_tables.tables(found))


def write(
  output: pathlib.Path,
  rows: Sequence[metrics.Row],
  *measured: Any,
  samples: Sequence[trajectories.Sample] | None = None,
  recorded: Sequence[trajectories.Sample] = (),
  words: dict[str, str] | None = None,
  **options: Any,
) -> dict[str, Any]:
  """Writes a report; `recorded` are of trainings, `words` title and notes."""
  found = study_lib.measure(rows, *measured, **options)
  if samples is None:
    samples = [trajectories.Sample(r.label, r.episodes) for r in rows]
  return page.write(output, found, samples, recorded, **(words or {}))
