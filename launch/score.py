r"""Scores recorded trajectories offline.

    python -m launch.score --input=groups.jsonl --output=scores.jsonl \
        [--config=configs/x.py] [--scorer=official]

Each input line is one group:

    {"question": str, "golden_answers": [str, ..], "budget": int,
     "scaffold": bool, "trajectories": [
       {"spans": [{"author": "model" | "environment", "text": str}, ..],
        "searches": int, "generated_tokens": int, "failed": bool}, ..]}

`failed` is optional (default false). Other keys are ignored, except those that
--scorer needs (see below). Output line n has the scores of input line n, with
its trajectories in the same order:

    {"trajectories": [
       {"answer": str | null, "em": 0 | 1, "format": 0 | 1, "length": float,
        "r_abs": float, "r_rel": float, "tool": float, "gamma": float,
        "total": float, "advantage": float}, ..]}

`length` is R_length and `tool` is r_abs * r_rel, both unweighted; `gamma` is
gamma_q, one value for the group. A failed trajectory has null for every key and
is excluded from the group's statistics. Without --config the paper's weights
apply.

--scorer=official adds `official_em` and `official_f1` to each trajectory: the
score of its answer by the published evaluation script of the data set, or null
if the set has no script. A group then needs `dataset`, the name that
launch.prepare_data gives the set, and also `official_answers` if the script
accepts other answers than `golden_answers`. Groups that training recorded have
both.

The reward is AnySearch's. The rewards of other systems (`method.name`) may need
more than these files contain; they are in the files that training wrote, where
each trajectory has `answer`, `em`, `format`, `reward`, its `parts` and
`advantage`.

`searches` is used as recorded: if it disagrees with the text, the format is 0
and the rewards still use `searches`. Above the budget r_abs is negative, as its
equation says.

A malformed (or blank) line is reported on standard error with its number; the
exit code is 2 and no output is written. An existing output file is replaced
only on success.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
import reprlib
import sys
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from absl import flags

from anysearch_jax import config as config_lib
from anysearch_jax import types
from anysearch_jax.algorithms import grpo, rewards
from anysearch_jax.environment import official_scoring, scoring
from anysearch_jax.host import disk
from launch import flags as launch_flags

_AUTHORS = {
  "model": types.Author.MODEL,
  "environment": types.Author.ENVIRONMENT,
}
_NAMES = {
  bool: "true or false",
  dict: "an object",
  int: "an integer",
  list: "a list",
  str: "a string",
}
_FLOATS = ("length", "r_abs", "r_rel", "tool", "gamma", "total", "advantage")
_LARGEST = 2**31 - 1  # Counts are stored as int32.


@dataclasses.dataclass(frozen=True)
class RecordedTrajectory:
  """One trajectory of a file: what scoring needs of a `types.Trajectory`."""

  spans: tuple[types.Span, ...]
  searches: int
  generated_tokens: int
  failed: bool


@dataclasses.dataclass(frozen=True)
class RecordedGroup:
  """One line of a file: what scoring needs of a `types.Group`."""

  golden_answers: tuple[str, ...]
  budget: int
  scaffold: bool
  trajectories: tuple[RecordedTrajectory, ...]
  dataset: str = ""
  official_answers: tuple[str, ...] = ()


def parse_group(line: bytes, *, scorer: str = "paper") -> RecordedGroup:
  """Parses one input line. Raises ValueError if it is malformed."""
  try:
    record = json.loads(line.decode(), parse_constant=_refuse_constant)
  except RecursionError:
    raise ValueError("found JSON nested too deep, expected a group.") from None
  except ValueError as error:
    raise ValueError(f"found no JSON value ({error}).") from None
  record = _typed(record, dict, "the line")
  _member(record, "question", str, "")
  trajectories = _member(record, "trajectories", list, "")
  return RecordedGroup(
    golden_answers=_texts(record, "golden_answers"),
    budget=_count(record, "budget", ""),
    scaffold=_member(record, "scaffold", bool, ""),
    trajectories=tuple(
      _trajectory(item, f"trajectories[{i}]")
      for i, item in enumerate(trajectories)
    ),
    **(_of_script(record) if scorer == "official" else {}),
  )


def _of_script(record: dict) -> dict[str, Any]:
  """Returns the fields of a group that only the official scorer needs."""
  name = official_scoring.ANSWERS
  return {
    "dataset": _member(record, "dataset", str, ""),
    name: _texts({name: [], **record}, name),
  }


def score_group(
  group: RecordedGroup, config: config_lib.ExperimentConfig
) -> list[dict[str, Any]]:
  """Returns one group's scores; all values of a failed trajectory are None."""
  verdicts = [
    scoring.judge(
      trajectory.spans,
      golden_answers=group.golden_answers,
      budget=group.budget,
      searches=trajectory.searches,
      scaffold=group.scaffold,
    )
    for trajectory in group.trajectories
  ]
  size = len(verdicts)
  if not size:
    return []
  extra: list[dict[str, float | None]] = [{} for _ in verdicts]
  if config.evaluation.scorer == "official":
    accepted = group.official_answers or group.golden_answers
    extra = [
      official_scoring.named(
        official_scoring.score(group.dataset, verdict.answer, accepted)
      )
      for verdict in verdicts
    ]
  # Padded to a power of two, so that few group sizes are compiled.
  padded = 1 << (size - 1).bit_length()
  columns = np.zeros((4, padded), np.int32)
  columns[:, :size] = [
    [verdict.em for verdict in verdicts],
    [verdict.format or 0 for verdict in verdicts],
    [item.generated_tokens for item in group.trajectories],
    [item.searches for item in group.trajectories],
  ]
  valid = np.zeros(padded, np.bool_)
  valid[:size] = [not item.failed for item in group.trajectories]
  # Rewards of trajectories that differ by one token differ very little, and
  # dividing by the group's spread would amplify float32 rounding.
  with jax.enable_x64(True):
    reward, advantage = jax.device_get(
      _score(*columns, np.int32(group.budget), valid, config=config)
    )
  values = {
    **reward._asdict(),
    "gamma": np.full(padded, reward.gamma),
    "advantage": advantage,
  }
  return [
    {
      **dataclasses.asdict(verdict),
      **{key: float(values[key][i]) for key in _FLOATS},
      **extra[i],
    }
    if valid[i]
    else dict.fromkeys(("answer", "em", "format", *_FLOATS, *extra[i]))
    for i, verdict in enumerate(verdicts)
  ]


@functools.partial(jax.jit, static_argnames="config")
def _score(em, format_, tokens, searches, budget, valid, *, config):
  reward = rewards.composite(
    em, format_, tokens, searches, budget, valid, config=config.reward
  )
  advantage = grpo.advantages(
    reward.total,
    valid,
    epsilon=config.objective.advantage_epsilon,
    normalize=config.objective.normalize,
  )
  return reward, advantage


def score_file(
  source: pathlib.Path,
  target: pathlib.Path,
  config: config_lib.ExperimentConfig,
) -> None:
  """Scores every line of `source` into `target`, which is written whole.

  Raises:
    ValueError: a line is malformed (the message has its number), or the
      configuration is of another system than AnySearch.
    OSError: a file cannot be read or written.
  """
  if config.method.name != "anysearch":
    raise ValueError(
      f"method.name: found {config.method.name!r}, expected 'anysearch', whose "
      "reward this is. What trajectories of other systems earned stands in the "
      "files of their training."
    )
  if config.objective.normalize == "batch":
    raise ValueError(
      "objective.normalize: found 'batch', expected 'group' or 'none': a line "
      "is one group, and does not say which groups were a rollout."
    )
  if config.objective.baseline == "turn":
    raise ValueError(
      "objective.baseline: found 'turn', expected 'group': a line has one "
      "advantage for each trajectory, not for each turn."
    )
  if config.reward.function:
    raise ValueError(
      f"reward.function: found {config.reward.function!r}, expected nothing: "
      "this scores by AnySearch's reward. What trajectories earned by a reward "
      "of your own is in the files of their training."
    )
  with (
    disk.replacing(target) as beside,
    open(source, "rb") as lines,
    open(beside, "w") as output,
  ):
    for number, line in enumerate(lines, 1):
      try:
        group = parse_group(line, scorer=config.evaluation.scorer)
      except ValueError as error:
        raise ValueError(f"{source}, line {number}: {error}") from None
      scores = {"trajectories": score_group(group, config)}
      output.write(json.dumps(scores, allow_nan=False) + "\n")


def _trajectory(item: Any, where: str) -> RecordedTrajectory:
  item = _typed(item, dict, where)
  spans = _member(item, "spans", list, where)
  return RecordedTrajectory(
    spans=tuple(
      _span(span, f"{where}.spans[{i}]") for i, span in enumerate(spans)
    ),
    searches=_count(item, "searches", where),
    generated_tokens=_count(item, "generated_tokens", where),
    failed=_member({"failed": False, **item}, "failed", bool, where),
  )


def _span(span: Any, where: str) -> types.Span:
  span = _typed(span, dict, where)
  author = _member(span, "author", str, where)
  if author not in _AUTHORS:
    raise ValueError(
      f"{where}.author: found {reprlib.repr(author)}, expected "
      f"{' or '.join(map(repr, _AUTHORS))}."
    )
  return types.Span(_AUTHORS[author], _member(span, "text", str, where))


def _texts(record: dict, key: str) -> tuple[str, ...]:
  return tuple(
    _typed(item, str, f"{key}[{i}]")
    for i, item in enumerate(_member(record, key, list, ""))
  )


def _member(record: dict, key: str, kind: type, where: str) -> Any:
  where = f"{where}.{key}".lstrip(".")
  if key not in record:
    raise ValueError(f"{where}: missing, expected {_NAMES[kind]}.")
  return _typed(record[key], kind, where)


def _count(record: dict, key: str, where: str) -> int:
  value = _member(record, key, int, where)
  if not 0 <= value <= _LARGEST:
    raise ValueError(
      f"{f'{where}.{key}'.lstrip('.')}: found {reprlib.repr(value)}, expected "
      f"0 to {_LARGEST}."
    )
  return value


def _typed(value: Any, kind: type, where: str) -> Any:
  if type(value) is not kind:  # `isinstance` would accept a bool as an int.
    raise ValueError(
      f"{where}: found {reprlib.repr(value)}, expected {_NAMES[kind]}."
    )
  return value


def _refuse_constant(name: str) -> None:
  raise ValueError(f"{name} is not JSON")


def main(argv: Sequence[str]) -> int:
  """Scores --input into --output; returns the exit code."""
  del argv
  try:
    config = launch_flags.read_config()
    if flags.FLAGS.scorer:
      config = dataclasses.replace(
        config,
        evaluation=dataclasses.replace(
          config.evaluation, scorer=flags.FLAGS.scorer
        ),
      )
    score_file(
      pathlib.Path(flags.FLAGS.input), pathlib.Path(flags.FLAGS.output), config
    )
  except (ValueError, OSError) as error:
    print(error, file=sys.stderr)
    return 2
  return 0


def define_flags() -> None:
  """Defines the command's flags."""
  launch_flags.define_config(required=False)
  flags.DEFINE_enum(
    "scorer", None, ("paper", "official"), "For config.evaluation.scorer."
  )
  flags.DEFINE_string("input", None, "Recorded groups, one JSON a line.")
  flags.DEFINE_string("output", None, "Where the scores go.")
  flags.mark_flags_as_required(["input", "output"])


if __name__ == "__main__":
  define_flags()
  launch_flags.run(main)
