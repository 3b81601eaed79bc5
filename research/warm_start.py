"""Trains a policy of the generated world on supervised demonstrations.

    python -m research.warm_start --config=configs/quickstart.py --output=mine

The policy starts from nothing, or from `--start`. Writes a Hugging Face folder.
Held-out demonstrations first check that the policy makes the decisions that
reinforcement learning builds on; a policy that fails is written to
`<folder>.rejected`.

Until then `<folder>.partial` holds where the training is. If the command is
stopped or killed, running it again resumes there and ends with the same policy
as an uninterrupted run.
"""

from __future__ import annotations

import dataclasses
import pathlib
import shutil
import sys
import time
from collections.abc import Sequence

import numpy as np
from absl import app, flags

import anysearch_jax as aj
from research import demonstrations, fitting, warm_start_settings
from research.study import load_config

# The least accuracy that the scaffold adds, at this budget over so many
# questions.
_SCAFFOLD_GAIN, _BUDGET, _PLAYED = 0.08, 8, 200
_STATE = "state.safetensors"


def fitted(
  config: aj.ExperimentConfig,
  policy: aj.Policy,
  saved: pathlib.Path,
  *,
  warm_start: warm_start_settings.WarmStart,
  save_every: int = 50,
) -> aj.Policy:
  """Returns the policy after supervised demonstrations.

  Args:
    config: of episodes.
    policy: where it starts from.
    saved: file from which a killed call resumes.
    warm_start: what is fitted, and how.
    save_every: steps between saves.
  """
  world = aj.World(config.data.world_seed, config.data.world_reliability)
  began = 0.0
  pool = demonstrations.pool(
    _setting(config, world, policy),
    world.questions("train", warm_start.demonstrations, config.seed),
    seed=config.seed,
    decision_weight=warm_start.decision_weight,
  )

  def shown(step: int, loss: float) -> None:
    nonlocal began
    if time.monotonic() - began > 2 or step == warm_start.steps:
      began = time.monotonic()
      print(f"step {step}/{warm_start.steps} loss {loss:.3f}", flush=True)

  params = fitting.fit(
    policy.params,
    policy.architecture,
    pool,
    seed=config.seed,
    config=warm_start,
    optimizer=config.optimizer,
    batch=config.batch,
    on_step=shown,
    saved=saved,
    save_every=save_every,
  )
  return policy._replace(params=params)


def play(
  config: aj.ExperimentConfig,
  policy: aj.Policy,
  budget: int,
  count: int,
  *,
  scaffold: bool = False,
) -> tuple[float, float]:
  """Returns the shares of answers and of right answers to "dev" questions."""
  world = aj.World(config.data.world_seed, config.data.world_reliability)
  engine = aj.make_engine(policy, config, seed=config.seed)
  try:
    played = aj.run(
      aj.run_groups(
        [
          aj.Assignment(i, question, budget, scaffold)
          for i, question in enumerate(world.evaluation_questions(count, "dev"))
        ],
        aj.EpisodeParts(
          engine,
          aj.LexicalRetriever(world.corpus, reads=world.searched),
          config.episode,
          policy.tokenizer,
          aj.environment_of(config.episode),
        ),
        group=1,
        rollout=0,
        max_concurrency=config.engine.slots,
      )
    )
  finally:
    engine.close()
  ended = [t for group in played.groups for t in group.trajectories]
  judge = aj.get_environment(config.episode.prompts).judge
  answered = sum(t.outcome.value == "answered" for t in ended) / count
  return answered, sum(judge(t).em for t in ended) / count


def _setting(
  config: aj.ExperimentConfig, world: aj.World, policy: aj.Policy
) -> demonstrations.Setting:
  return demonstrations.Setting(
    world,
    aj.LexicalRetriever(world.corpus, reads=world.searched).lookup,
    policy.tokenizer,
    config.episode,
  )


def lacks(config: aj.ExperimentConfig, policy: aj.Policy) -> list[str]:
  """Probes the policy, prints what it found, and returns what it lacks."""
  found, right = [], []
  world = aj.World(config.data.world_seed, config.data.world_reliability)
  for scaffold in (False, True):
    with_scaffold = ", with scaffold" if scaffold else ""
    probes = demonstrations.probe_sets(
      _setting(config, world, policy),
      "dev",
      count=600,
      seed=config.seed,
      scaffold=scaffold,
    )
    p = fitting.probe(policy.params, policy.architecture, probes)
    for kind, mean in fitting.by_kind(p, probes).items():
      print(f"P({kind}{with_scaffold}) {mean:.3f}")
    found += [each + with_scaffold for each in fitting.gate(p, probes)]
    right.append(play(config, policy, _BUDGET, _PLAYED, scaffold=scaffold)[1])
  plain, scaffolded = right
  print(f"accuracy at budget {_BUDGET} {plain:.3f}, scaffold {scaffolded:.3f}")
  if scaffolded - plain < _SCAFFOLD_GAIN:
    found.append(
      f"gain by the scaffold: found {scaffolded - plain:.3f}, expected at "
      f"least {_SCAFFOLD_GAIN}"
    )
  return found


def define_flags() -> None:
  """Defines the command's flags; importing the module defines none."""
  flags.DEFINE_string("config", "configs/quickstart.py", "FILE or FILE:PRESET.")
  flags.DEFINE_string("output", None, "Folder.", required=True)
  flags.DEFINE_string("start", None, "Policy to start from; default: nothing.")
  flags.DEFINE_integer("save_every", 50, "Steps between saves.", lower_bound=1)


def main(argv: Sequence[str]) -> None:
  if len(argv) > 1:
    raise app.UsageError(f"Unexpected argument {argv[1]!r}.")
  f = flags.FLAGS
  config, folder = load_config(f.config), pathlib.Path(f.output)
  partial = folder.with_name(folder.name + ".partial")
  try:
    aj.validate(config, trains=False, samples=False)
    warm_start = warm_start_settings.load(f.config)
    policy = (
      aj.load_policy(f.start)
      if f.start
      else fitting.fresh(
        aj.World(config.data.world_seed, config.data.world_reliability),
        warm_start,
        seed=config.seed,
      )
    )
    made = dataclasses.asdict(config)
    made |= {"start": f.start, "warm_start": dataclasses.asdict(warm_start)}
    aj.claim_folder(partial, {"config.json": made})
    policy = fitted(
      config,
      policy,
      partial / _STATE,
      warm_start=warm_start,
      save_every=f.save_every,
    )
    wrong = lacks(config, policy)
    if wrong:
      folder = folder.with_name(folder.name + ".rejected")
    aj.save_policy(folder, policy, dtype=np.float16)
  except (OSError, ValueError) as error:
    sys.exit(f"research.warm_start: {error}")
  # First, because without config.json it could be another run's.
  (partial / _STATE).unlink()
  shutil.rmtree(partial)
  print(f"policy: {folder}")
  if wrong:
    sys.exit("The warm start is too weak: " + "; ".join(wrong) + ".")


if __name__ == "__main__":
  define_flags()
  app.run(main)
