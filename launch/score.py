r"""Scores recorded trajectories offline.

    anysearch score --input=groups.jsonl --output=scores.jsonl \
        [--config=configs/x.py] [--config.evaluation.scorer=official]
    anysearch score --input=E/episodes.jsonl --output=E/episodes.jsonl \
        --judge=http://127.0.0.1:8000/v1 --judge_model=Qwen/Qwen3-32B

Each input line is one group:

    {"question": str, "golden_answers": [str, ..], "budget": int,
     "scaffold": bool, "trajectories": [
       {"spans": [{"author": "model" | "environment", "text": str}, ..],
        "searches": int, "generated_tokens": int, "failed": bool}, ..]}

`failed` is optional (default false). Other keys are ignored, except those that
the official scorer needs (see below). Output line n has the scores of input
line n, with its trajectories in the same order:

    {"trajectories": [
       {"answer": str | null, "em": 0 | 1, "format": 0 | 1, "length": float,
        "r_abs": float, "r_rel": float, "tool": float, "gamma": float,
        "total": float, "advantage": float}, ..]}

`length` is R_length and `tool` is r_abs * r_rel, both unweighted; `gamma` is
gamma_q, one value for the group. A failed trajectory has null for every key and
is excluded from the group's statistics. Without --config the paper's weights
apply.

The official scorer adds `official_em` and `official_f1` to each trajectory: the
score of its answer by the published evaluation script of the data set, or null
if the set has no script. A group then needs `dataset`, the name that
anysearch prepare_data gives the set, and also `official_answers` if the script
accepts other answers than `golden_answers`. Groups that training recorded have
both.

--judge asks a model of a server whether the answers of an evaluation are right.
The output has its episodes with `judge`, `judged`, `confidence` and
`judge_reply`, which anysearch report reads. Run the same command again if
replies were late.

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
import operator
import pathlib
import reprlib
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import numpy as np
import pydantic
from absl import app, flags

from anysearch_jax import budgets, types
from anysearch_jax import config as config_lib
from anysearch_jax.config import settings
from anysearch_jax.environment import official_scoring, scoring
from anysearch_jax.host import disk, json_files
from anysearch_jax.launch import flags as launch_flags

_FLOATS = ("length", "r_abs", "r_rel", "tool", "gamma", "total", "advantage")
_JUDGE_CALLS = 16  # At a time.
_episode_fields = operator.itemgetter(
  "failed", "answer", "question", "golden_answers"
)
_MAX_COUNT = 2**31 - 1  # Counts are stored as int32.
# Settings that must have one of these values to be scored, and why.
_IN_TRAINING = (
  "what such trajectories earned is in the files of their training."
)
_REQUIRED_SETTINGS = (
  ("method.name", ("anysearch",), f"this is its reward; {_IN_TRAINING}"),
  (
    "objective.normalize",
    ("group", "none"),
    "a line is one group, and does not say which groups were a rollout.",
  ),
  (
    "objective.baseline",
    ("group",),
    "a line has one advantage for each trajectory, not for each turn.",
  ),
  ("reward.function", ("",), f"this is AnySearch's reward; {_IN_TRAINING}"),
)


_Count = Annotated[int, pydantic.Field(ge=0, le=_MAX_COUNT)]


class RecordedSpan(pydantic.BaseModel, strict=True):
  """One `types.Span` of a file."""

  author: Literal["model", "environment"]
  text: str


class RecordedTrajectory(pydantic.BaseModel, strict=True):
  """One trajectory of a file: the values of it that scoring needs."""

  spans: list[RecordedSpan]
  searches: _Count
  generated_tokens: _Count
  failed: bool = False


class RecordedGroup(pydantic.BaseModel, strict=True):
  """One line of a file: the values of a `types.Group` that scoring needs."""

  question: str
  trajectories: list[RecordedTrajectory]
  golden_answers: list[str]
  budget: _Count
  scaffold: bool


class OfficialGroup(RecordedGroup, strict=True):
  """A recorded group with the values that the official scorer needs."""

  dataset: str
  official_answers: list[str] = []


def parse_group(line: bytes, *, scorer: str = "paper") -> RecordedGroup:
  """Parses one input line. Raises ValueError if it is malformed."""
  try:
    text = line.decode()
    record = json_files.parse(text, parse_constant=_refuse_constant)
  except (ValueError, RecursionError) as error:
    raise ValueError(f"found no JSON value ({error}).") from None
  try:
    kind = OfficialGroup if scorer == "official" else RecordedGroup
    return kind.model_validate(record)
  except pydantic.ValidationError as error:
    error_details = error.errors(include_url=False)[0]
  place = ".".join(map(str, error_details["loc"])) or "the line"
  value = reprlib.repr(error_details["input"])
  raise ValueError(f"{place}: found {value}. {error_details['msg']}.")


def _refuse_constant(name: str) -> None:
  raise ValueError(f"{name} is not JSON")


def score_group(
  group: RecordedGroup, config: config_lib.ExperimentConfig
) -> list[dict[str, Any]]:
  """Returns one group's scores; all values of a failed trajectory are None."""
  import jax

  verdicts = [
    scoring.judge(
      [
        types.Span(types.Author[span.author.upper()], span.text)
        for span in trajectory.spans
      ],
      golden_answers=group.golden_answers,
      budget=group.budget,
      searches=trajectory.searches,
      scaffold=group.scaffold,
    )
    for trajectory in group.trajectories
  ]
  if not verdicts:
    return []
  official_scores: list[dict[str, float | None]] = [{} for _ in verdicts]
  if isinstance(group, OfficialGroup):
    accepted = group.official_answers or group.golden_answers
    official_scores = [
      official_scoring.by_name(
        official_scoring.score(group.dataset, verdict.answer, accepted)
      )
      for verdict in verdicts
    ]
  columns = np.transpose(
    [
      (verdict.em, verdict.format or 0, item.generated_tokens, item.searches)
      for verdict, item in zip(verdicts, group.trajectories, strict=True)
    ]
  ).astype(np.int32)
  valid = np.array([not item.failed for item in group.trajectories])
  # Rewards of trajectories that differ by one token differ very little, and
  # dividing by the group's spread would amplify float32 rounding.
  with jax.enable_x64(True):
    reward, advantage = jax.device_get(
      _compiled()(*columns, np.int32(group.budget), valid, config=config)
    )
  scores_by_name = {
    **reward._asdict(),
    "gamma": np.full(len(verdicts), reward.gamma),
    "advantage": advantage,
  }
  rows: list[dict[str, Any]] = []
  for i, verdict in enumerate(verdicts):
    row = dataclasses.asdict(verdict)
    row |= {key: float(scores_by_name[key][i]) for key in _FLOATS}
    row |= official_scores[i]
    rows.append(row if valid[i] else dict.fromkeys(row))
  return rows


@functools.cache
def _compiled() -> Any:
  """Returns a jitted function: columns of a group to rewards and advantages."""
  import jax

  from anysearch_jax.algorithms import grpo, rewards

  @functools.partial(jax.jit, static_argnames="config")
  def score(em, format_, tokens, searches, budget, valid, *, config):
    reward = rewards.composite(
      em, format_, tokens, searches, budget, valid, config=config.reward
    )
    advantage = grpo.advantages(
      reward.total,
      valid,
      epsilon=config.objective.advantage_epsilon,
      normalize=config.objective.normalize,
      deviation=config.objective.deviation,
    )
    return reward, advantage

  return score


def score_file(
  source: pathlib.Path,
  target: pathlib.Path,
  config: config_lib.ExperimentConfig,
) -> None:
  """Scores every line of `source` into `target`, which is written whole.

  Args:
    source: file of recorded groups.
    target: file for the scores, which is replaced.
    config: has the weights of the rewards, and the scorer.

  Raises:
    ValueError: a line is malformed (the message has its number), or the
      configuration is of another system than AnySearch.
    OSError: a file cannot be read or written.
  """
  for path, accepted_values, reason in _REQUIRED_SETTINGS:
    section, _, name = path.partition(".")
    setting_value = getattr(getattr(config, section), name)
    if setting_value not in accepted_values:
      raise ValueError(
        f"{path}: found {setting_value!r}, expected "
        f"{' or '.join(map(repr, accepted_values))}: {reason}"
      )
  with (
    disk.replacing(target) as draft,
    open(source, "rb") as lines,
    open(draft, "w") as output,
  ):
    for number, line in enumerate(lines, 1):
      try:
        group = parse_group(line, scorer=config.evaluation.scorer)
      except ValueError as error:
        raise ValueError(f"{source}, line {number}: {error}") from None
      scores = {"trajectories": score_group(group, config)}
      output.write(json.dumps(scores, allow_nan=False) + "\n")


def judge_file(f: flags.FlagValues) -> None:
  """Judges the episodes of --input into --output; a kill loses nothing.

  Raises ValueError for an invalid flag or line, and if replies were late.
  """
  from anysearch_jax.evaluation import harness, journal, judging
  from anysearch_jax.host import json_files, loop, openai_endpoint, run_lock

  endpoint = openai_endpoint.OpenAIEndpoint(
    f.judge,
    "/chat/completions",
    key_variable=f.judge_key_variable,
    deadline=f.judge_deadline,
    concurrency=_JUDGE_CALLS,
  )
  prompt = judging.prompt(f.judge_prompt)
  name = f"{f.judge_model}, prompt {json_files.sha256(prompt)[:8]}"
  source = pathlib.Path(f.input)
  target = pathlib.Path(f.output)
  failed: list[Exception] = []

  def key(row: journal.Row) -> tuple[Any, ...]:
    return row["seed"], str(budgets.of_row(row)), row["question_id"]

  async def judge(row: journal.Row) -> None:
    try:
      verdict = await judging.judge(row, endpoint, f.judge_model, prompt)
      rows.add({**row, "judge": name, **verdict})
    except types.RetrievalError as error:
      failed.append(error)

  positions: dict[tuple[Any, ...], int] = {}
  for number, row in enumerate(journal.read(source), 1):
    try:
      episode_key = key(row)
      _episode_fields(row)[-1][0]  # Raises LookupError if one is missing.
      if episode_key in positions:
        raise ValueError(f"{episode_key} a second time")
    except (LookupError, TypeError, ValueError) as error:
      raise ValueError(
        f"{source}, row {number}: found no episode ({error!r}), "
        "expected the lines of an evaluation's episodes.jsonl, each once."
      ) from error
    positions[episode_key] = len(positions)
  with (
    run_lock.hold(target.parent / run_lock.NAME),
    journal.Journal(
      target,
      len(positions),
      lambda row: positions[key(row)],
      again=lambda row: row["judge"] != name,
    ) as rows,
  ):
    unjudged_rows = (
      x for x in journal.read(source) if positions[key(x)] not in rows
    )
    loop.run(harness.run_each(unjudged_rows, judge, at_once=_JUDGE_CALLS))
    if failed:
      raise ValueError(
        f"--judge: found no verdict on {len(failed)} of {len(positions)} "
        f"answers ({failed[0]}); run the same command again."
      )
    rows.finish()


def main(argv: Sequence[str]) -> None:
  """Scores --input into --output."""
  f = flags.FLAGS
  try:
    if f.judge:
      return judge_file(f)
    config = launch_flags.read_config()
    settings.check(config)
    score_file(pathlib.Path(f.input), pathlib.Path(f.output), config)
  except (ValueError, OSError) as error:
    raise app.UsageError(str(error)) from error


def define_flags() -> None:
  """Defines the command's flags."""
  launch_flags.define_config(required=False)
  flags.DEFINE_string(
    "input",
    None,
    "File of recorded groups, one JSON object a line; with --judge, "
    "episodes.jsonl of an evaluation.",
  )
  flags.DEFINE_string(
    "output", None, "File for the scores; it is replaced, and may be --input."
  )
  flags.DEFINE_string(
    "judge",
    None,
    "Address of a server of chat completions, such as "
    "http://127.0.0.1:8000/v1, whose model judges the answers.",
  )
  flags.DEFINE_string("judge_model", "", "Name of the model at --judge.")
  flags.DEFINE_string(
    "judge_key_variable",
    "",
    "Environment variable with the key for --judge; default: no key.",
  )
  flags.DEFINE_string(
    "judge_prompt",
    "",
    "File of the judge's prompt, in the form of evaluation/judge.toml; "
    "default: that file.",
  )
  flags.DEFINE_float(
    "judge_deadline", 120.0, "Seconds that one judgement may take.", 0.0
  )
  flags.mark_flags_as_required(["input", "output"])


if __name__ == "__main__":
  define_flags()
  launch_flags.run(main)
