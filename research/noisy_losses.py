"""What policies lose in the noisy world, decision by decision, and a figure.

    python -m research.noisy_losses runs/noisy-world/study/*/evaluation/plain
    python -m research.noisy_losses --figure=reward.svg \
        Best=runs/noisy-world/best Priced=$S/priced-42/evaluation/plain ...

Arguments are folders of evaluations, those with the same `LABEL=` the trainings
of one row. Without a label, `ROW-SEED/evaluation/plain` is of the row ROW. A
decision is judged by what the passages have shown, whatever the policy says
about them: it loses the largest expected reward before it, less that after it.
With V, the optimum's value before the first search,

    V - reward = losses of decisions + luck

exactly, and luck is 0 on average. V - losses is therefore `expected`, what the
policy earns without the luck of passages and answers. Prints these means by
budget for each row, without the budget of 0 searches in the pooled column.
"""

from __future__ import annotations

import collections
import pathlib
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from absl import app, flags

import anysearch_jax as aj
from research import noisy_agent as agent
from research import noisy_optimum as optimum
from research import noisy_world as world

STOP, REPEAT = "stops too early", "searches too long"
CHEAP, DEAR = "cheap, not dear", "dear, not cheap"
SILENT, LOUD = "silent, not an answer", "an answer, not silent"
OTHER = "a less probable value"
SLIP, LUCK = "no such action", "luck"
KINDS = (STOP, REPEAT, CHEAP, DEAR, SILENT, LOUD, OTHER, SLIP, LUCK)


def lost(record: Mapping[str, Any]) -> dict[str, float]:
  """Returns what an episode of `episodes.jsonl` loses, by `KINDS`.

  Also returns its `reward`, V as `optimum`, and `expected`.
  """
  m, left = record["metadata"], record["budget"]
  found = dict.fromkeys(KINDS, 0.0)
  start = here = agent.Situation(m["subject"], m["relation"], left)
  reward = 0.0
  for each in record["observations"]:
    query = " ".join(each["argument"].split())
    source = world.source_of(query, m["subject"], m["relation"])
    options = optimum.options(here.belief(), here.left)
    reward -= world.charged([query])
    here = here._replace(left=here.left - 1)
    if source is None:
      worth = optimum.value(here.belief(), here.left) - world.charged([query])
      found[SLIP] += max(options.values()) - worth
      continue
    ends = max(options[end] for end in optimum.ENDS)
    kind = CHEAP if source == world.CHEAP else DEAR
    if ends >= max(options[name] for name in world.SOURCES):
      kind = REPEAT
    found[kind] += max(options.values()) - options[source]
    value = each["passages"][0]["text"].split()[1]
    here = here._replace(seen=(*here.seen, (source, value)))
  for kind, loss in _end(here, record["answer"]):
    found[kind] += loss
  if record["answer"] == world.NOTHING:
    reward += world.ABSTAIN
  reward += record["em"]
  value = optimum.value(start.belief(), start.left)
  expected = value - sum(found.values())
  found[LUCK] = expected - reward
  return found | {"reward": reward, "optimum": value, "expected": expected}


def _end(
  here: agent.Situation, answer: str | None
) -> Iterable[tuple[str, float]]:
  """Yields what is lost by ending with this answer."""
  options = optimum.options(here.belief(), here.left)
  ends = max(options[end] for end in optimum.ENDS)
  yield STOP, max(options.values()) - ends
  if answer == world.NOTHING:
    yield SILENT, ends - world.ABSTAIN
    return
  probable = here.probabilities().get(answer or "")
  if probable is None:
    yield SLIP, ends
    return
  yield LOUD, ends - options[optimum.ANSWER]
  yield OTHER, options[optimum.ANSWER] - probable


class Row:
  """Sums of all episodes of a row, by budget and training.

  Attributes:
    name: of the row.
    losses: mean of `lost` at each budget, over trainings.
    shares: means of `right`, `silent`, `cheap` and `dear`, in the same way.
  """

  def __init__(self, name: str, trainings: Sequence[Iterable[Mapping]]):
    self.name = name
    cells: dict = collections.defaultdict(list)
    for number, episodes in enumerate(trainings):
      for record in episodes:
        if not record["failed"]:
          dear = sum(world.VERDICT in q.split() for q in record["queries"])
          more = {
            "right": record["em"],
            "silent": record["answer"] == world.NOTHING,
            "cheap": record["searches"] - dear,
            "dear": dear,
          }
          cells[record["budget"], number].append(lost(record) | more)
    self.budgets = sorted({budget for budget, _ in cells})
    self.trainings = len(trainings)
    names = cells and next(iter(cells.values()))[0]
    self._means = {
      name: np.array(
        [
          [
            np.mean([each[name] for each in cells[budget, number]])
            for budget in self.budgets
          ]
          for number in range(self.trainings)
        ]
      )
      for name in names
    }

  def by_budget(self, name: str) -> np.ndarray:
    """Returns the means over trainings at each budget."""
    return self._means[name].mean(0)

  def pooled(self, name: str) -> np.ndarray:
    """Returns each training's mean over the budgets from 1 on."""
    used = np.array(self.budgets) >= 1
    return self._means[name][:, used].mean(1)


def table(rows: Sequence[Row]) -> str:
  """Returns a table for each row; after +-, the trainings' deviation."""
  out = []
  for row in rows:
    head = "".join(f"{f'B={b}':>8}" for b in row.budgets)
    out.append(f"{row.name:24}{head}{'pooled':>9}")

    def line(name: str, of: np.ndarray, pooled: np.ndarray) -> str:
      text = "".join(f"{x:8.3f}" for x in of) + f"{pooled.mean():9.3f}"
      if len(pooled) > 1:
        text += f" +- {pooled.std(ddof=1):.3f}"
      return f"{name:24}{text}"

    shown = (
      "optimum",
      "expected",
      "reward",
      "right",
      "silent",
      "cheap",
      "dear",
    )
    for name in (*shown, *KINDS):
      out.append(line(name, row.by_budget(name), row.pooled(name)))
    out.append("")
  return "\n".join(out)


def figure(rows: Sequence[Row], path: pathlib.Path) -> None:
  """Draws expected reward by budget, the optimum on top, and what is lost."""
  drawn, (left, right) = plt.subplots(
    1, 2, figsize=(10, 4), layout="constrained", width_ratios=(3, 2)
  )
  most = max(rows, key=lambda row: len(row.budgets))
  left.plot(most.budgets, most.by_budget("optimum"), "k--", label="optimum")
  bottom = np.zeros(len(rows))
  for row in rows:
    means = row.by_budget("expected")
    left.plot(row.budgets, means, marker="o", label=row.name)
  left.set(xlabel="budget of searches", ylabel="expected reward")
  left.margins(y=0.4)
  left.legend(fontsize=8, ncols=2, loc="upper left")
  names = [row.name for row in rows]
  for kind in KINDS[:-1]:
    width = np.array([row.pooled(kind).mean() for row in rows])
    right.barh(names, width, left=bottom, label=kind)
    bottom += width
  right.invert_yaxis()
  right.set(xlabel="lost reward, B >= 1")
  marks = right.get_legend_handles_labels()
  drawn.legend(*marks, loc="outside lower center", ncols=4, fontsize=8)
  drawn.savefig(path)
  plt.close(drawn)


def define_flags() -> None:
  """Defines the command's flags; importing the module defines none."""
  flags.DEFINE_string("figure", None, "SVG file of a figure to draw.")


def main(argv: Sequence[str]) -> None:
  if len(argv) < 2:
    raise app.UsageError("Name at least one folder of an evaluation.")
  folders: dict[str, list[pathlib.Path]] = collections.defaultdict(list)
  for name in argv[1:]:
    label, _, folder = name.rpartition("=")
    path = pathlib.Path(folder)
    if not (path / "episodes.jsonl").is_file():
      sys.exit(f"{path}: no episodes.jsonl; expected an evaluation's folder.")
    training, _, seed = path.parts[-3:][0].rpartition("-")
    folders[label or (training if seed.isdigit() else folder)].append(path)
  rows = [
    Row(label, [aj.read_episodes(path / "episodes.jsonl") for path in paths])
    for label, paths in folders.items()
  ]
  print(table(rows))
  if flags.FLAGS.figure:
    figure(rows, pathlib.Path(flags.FLAGS.figure))


if __name__ == "__main__":
  define_flags()
  app.run(main)
