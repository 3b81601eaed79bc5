"""Makes the warm start of the noisy world, from its soft expert's episodes.

    python -m research.noisy_start --output=runs/noisy-world/policy

The policy starts from the shipped one, which can copy and recall. The expert
ignores what is left of a budget and what a search costs, so that the reward has
to teach both. Held-out episodes
then check the words that are no decision (what is left, what memory holds, the
counters, the query), and the policy plays: it has to be below the optimum, and
above an agent that never searches and stays silent. A policy that fails is
written to `<folder>.rejected`.

If the command is killed, running it again resumes in `<folder>.partial` and
ends with the same policy.
"""

from __future__ import annotations

import dataclasses
import itertools
import pathlib
import shutil
import sys
from collections.abc import Iterable, Sequence

import numpy as np
from absl import app, flags

import anysearch_jax as aj
from research import demonstrations, fitting, noisy_agent, noisy_optimum
from research import noisy_world as world

_START = "configs/graded_world_policy"
# The least mean probability of words of each kind, and the room that training
# needs below the optimum. Counters are the hardest words: 2,400 steps give them
# .955 and a reward below that of silence, 6,000 steps .971 and .46.
_WORDS, _ROOM = 0.97, 0.05
_BUDGETS = (1, 3, 5, 8)
_PROBED, _PLAYED = 300, 200
_AFTER = {"budget": "left", "recall": "memory", "<search>": "query"}
KINDS = ("form", "left", "memory", "value", "count", "query")


def demonstrated(
  config: aj.ExperimentConfig, split: str, count: int
) -> list[aj.Trajectory]:
  """Returns episodes of the soft expert, under budgets of 0 to 8 searches."""
  codec = noisy_agent.codec()
  expert = noisy_agent.Agent(noisy_agent.softly, codec, config.seed)
  budgets = np.random.default_rng(config.seed).integers(9, size=count)
  asked = world.questions(split)[:count]
  return play(asked, budgets.tolist(), expert, codec, config)


def play(
  asked: Sequence[aj.Question],
  budgets: Iterable[int],
  engine: aj.Engine,
  codec: aj.Tokenizer,
  config: aj.ExperimentConfig,
) -> list[aj.Trajectory]:
  """Returns an episode of each question, with its budget."""
  groups = [
    aj.Assignment(i, question, budget, False)
    for i, (question, budget) in enumerate(zip(asked, budgets))
  ]
  environment = aj.environment_of(config.episode)
  parts = aj.EpisodeParts(
    engine, world.Search(), config.episode, codec, environment
  )
  slots = config.engine.slots
  found = aj.run(
    aj.run_groups(groups, parts, group=1, rollout=0, max_concurrency=slots)
  )
  return [t for group in found.groups for t in group.trajectories]


def decisions(words: Sequence[str]) -> list[str]:
  """Returns the kind of each of the model's words, "" of a decision.

  Decisions are whether a turn searches, in which way, and its answer.
  """
  kinds = []
  for before, last, word in zip(["", "", *words], ["", *words], words):
    if last in ("</think>", "<answer>") or before == "<search>":
      kinds.append("")
    elif last in _AFTER:
      kinds.append(_AFTER[last])
    elif word in world.VALUES:
      kinds.append("value")
    else:
      kinds.append("count" if word.isdigit() else "form")
  return kinds


def probes(
  trajectories: Sequence[aj.Trajectory], codec: aj.Tokenizer
) -> demonstrations.Probes:
  """Returns probes of the words that are no decision, by `KINDS`."""
  most = max(len(t.token_ids) for t in trajectories)
  ids = [
    np.pad(t.token_ids, (0, most - len(t.token_ids))) for t in trajectories
  ]
  found = []
  for row, t in enumerate(trajectories):
    words = codec.hf.convert_ids_to_tokens(t.token_ids.tolist())
    kinds = decisions(words)
    found += [
      (row, at, t.token_ids[at], KINDS.index(kinds[at]))
      for at in np.flatnonzero(t.authors == aj.Author.MODEL)
      if kinds[at]
    ]
  rows, positions, labels, each = np.array(found, np.int32).T
  return demonstrations.Probes(
    np.stack(ids).astype(np.int32),
    rows,
    positions,
    labels,
    each.astype(np.int8),
  )


def lacks(config: aj.ExperimentConfig, policy: aj.Policy) -> list[str]:
  """Probes and plays the policy; returns in words what it lacks."""
  made = probes(demonstrated(config, "dev", _PROBED), policy.tokenizer)
  p = fitting.probe(policy.params, policy.architecture, made)
  wrong = []
  for i, kind in enumerate(KINDS):
    mean = float(p[made.kinds == i].mean())
    print(f"P({kind}) {mean:.4f}")
    if mean < _WORDS:
      wrong.append(f"{kind}: found {mean:.4f}, expected at least {_WORDS}")
  engine = aj.make_engine(policy, config, seed=config.seed)
  asked = world.questions("dev")[:_PLAYED]
  judge = aj.get_environment("world").judge
  try:
    for budget in _BUDGETS:
      budgets = itertools.repeat(budget)
      played = play(asked, budgets, engine, policy.tokenizer, config)
      found = np.mean(
        [world.earned(judge(t).answer, t.queries, t.question) for t in played]
      )
      best = noisy_optimum.mean_value(budget)
      searches = np.mean([t.searches for t in played])
      print(
        f"B = {budget}: reward {found:.3f}, optimum {best:.3f}, searches "
        f"{searches:.2f}"
      )
  finally:
    engine.close()
  if not world.ABSTAIN < found < best - _ROOM:
    wrong.append(
      f"reward at B = {budget}: found {found:.3f}, expected {world.ABSTAIN} to "
      f"{best - _ROOM:.3f}"
    )
  return wrong


def define_flags() -> None:
  """Defines the command's flags; importing the module defines none."""
  flags.DEFINE_string("output", None, "Folder.", required=True)


def main(argv: Sequence[str]) -> None:
  if len(argv) > 1:
    raise app.UsageError(f"Unexpected argument {argv[1]!r}.")
  config, folder = world.get_config(), pathlib.Path(flags.FLAGS.output)
  partial = folder.with_name(folder.name + ".partial")
  start = aj.load_policy(_START)
  try:
    aj.claim_folder(partial, {"config.json": dataclasses.asdict(config)})
    warm_start = world.get_warm_start()
    pool = [
      demonstrations.Demonstration(
        t.token_ids, (t.authors == aj.Author.MODEL).astype(np.float32)
      )
      for t in demonstrated(config, "train", warm_start.demonstrations)
    ]
    params = fitting.fit(
      start.params,
      start.architecture,
      pool,
      seed=config.seed,
      config=warm_start,
      optimizer=config.optimizer,
      batch=config.batch,
      on_step=lambda step, loss: print(f"step {step} loss {loss:.3f}"),
      saved=partial / "state.safetensors",
    )
    policy = start._replace(params=params)
    wrong = lacks(config, policy)
    if wrong:
      folder = folder.with_name(folder.name + ".rejected")
    aj.save_policy(folder, policy, dtype=np.float16)
  except (OSError, ValueError) as error:
    sys.exit(f"research.noisy_start: {error}")
  # First, because without config.json it could be another run's.
  (partial / "state.safetensors").unlink()
  shutil.rmtree(partial)
  print(f"policy: {folder}")
  if wrong:
    sys.exit("The warm start is too weak: " + "; ".join(wrong) + ".")


if __name__ == "__main__":
  define_flags()
  app.run(main)
