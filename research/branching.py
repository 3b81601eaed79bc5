"""Measures the value of one more search by replaying stored episodes.

    python -m research.branching --evaluation=runs/x/evaluation/plain \
        --policy=runs/x/policy --output=runs/x/evaluation/plain/branches

A *cut* is a turn of a stored episode; every token before it is kept. At a cut
the policy asks for a search, and the episode ends in two ways: the search is
*granted*, or it is *refused* by the environment's line for a used-up budget.
Both ways have the same tokens up to and including the question asked, so both
are conditioned on asking, and their difference is what the search itself is
worth there: exact match if granted minus exact match if refused.

* `stop`: the cuts are the stored searches. The stored episode is the granted
  end; the refused one is sampled.
* `continue`: the cuts are the turns in which episodes answered with budget
  left. The turn is sampled again until it asks, at most `tries` times, and
  both ends are sampled. Their granted end minus the stored answer is also
  reported: the gain of searching instead of answering.

Rejection keeps every token the policy's own: no `<search>` is appended to
thoughts that led to an answer. Its draws, given that they ask, have the same
distribution whatever `tries` is; but which cuts are reached depends on it.
`branch_values` therefore weighs cuts by how often the policy asks there, and
bounds the mean over all cuts.

An episode is replayed by an engine that returns its stored turns. A refused
end is played with as many searches as were charged before the cut, and the
policy reads the stored tokens up to it, with the budget that these name. The
ends have a random address, so they can be drawn again exactly; both ends of a
sample share their random numbers.

The command plays questions of the generated world with a policy's folder;
`branch` takes any player and retriever. It writes branches.jsonl, one end a
line, and summary.json. If it is killed, running it again resumes.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import pathlib
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from absl import app, flags

import anysearch_jax as aj
from research import branch_values
from research.methods import control
from research.study import load_config

BRANCHES = "branches.jsonl"
Row = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Plan:
  """The ends to play.

  Attributes:
    episodes: number of episodes of each kind, chosen by hash; 0 takes all.
    samples: number of ends for each cut.
    tries: maximum number of samples of a turn until it searches.
  """

  episodes: int
  samples: int
  tries: int


class Cut(NamedTuple):
  """A turn at which a stored episode branches.

  Attributes:
    kind: `continue` or `stop`.
    searches: number of searches that were charged before.
    turn: index of the model turn that is sampled again.
  """

  kind: str
  searches: int
  turn: int


class Turn(NamedTuple):
  """A stored turn and the number of tokens before it."""

  start: int
  generation: aj.Generation


def branch(
  playing: aj.Playing,
  plan: Plan,
  *,
  evaluation: pathlib.Path,
  player: aj.Player,
  retriever: aj.Retriever,
  folder: pathlib.Path,
) -> dict[str, Any]:
  """Plays counterfactual ends and writes `branches.jsonl`, one end a line.

  If an earlier call was interrupted, its finished ends are kept and only its
  failed ones are played again.

  Args:
    playing: how the episodes of the evaluation were played.
    plan: the ends to play.
    evaluation: folder of the episodes.
    player: the policy that played them.
    retriever: answers the searches.
    folder: an existing folder to write to.

  Returns:
    The `branch_values.summary` of the ends.

  Raises:
    ValueError: the episodes have no tokens, are of another policy, have no
      cut, or cannot branch in their environment.
  """
  path = evaluation / "episodes.jsonl"
  check(playing.environment)
  places = _places(path, plan)
  if not places:
    raise ValueError(
      f"{path}: no episode answered with budget left and none searched; "
      "expected one of either kind, because ends branch there."
    )
  total = len(places) * plan.samples

  def place(row: Row) -> int:
    return places[_key(row, row["kind"], row["cut"])] + row["sample"]

  with aj.Journal(
    folder / BRANCHES,
    total,
    place,
    again=lambda row: row["outcome"] == "failed",
  ) as rows:
    parts = aj.EpisodeParts(
      player.engine,
      retriever,
      playing.episode,
      player.codec,
      playing.environment,
    )

    async def play(end: tuple[Row, Cut, int, int]) -> None:
      rows.add(await _played(*end, parts=parts, tries=plan.tries))

    ends = (end for end in _ends(path, places, plan) if end[-1] not in rows)
    aj.run(aj.run_each(ends, play, at_once=playing.slots))
    rows.finish()
  return branch_values.summary(aj.read_episodes(folder / BRANCHES))


def check(environment: aj.Environment) -> None:
  """Raises ValueError if episodes of an environment cannot branch."""
  if environment.turns_are_budget or environment.step is not None:
    raise ValueError(
      "episode.prompts: found an environment whose turns are the budget or "
      "which has a step of its own (it verifies answers, or is steered), so "
      "that its episodes cannot branch; expected another environment."
    )


def cuts(row: Row) -> list[Cut]:
  """Returns the cuts of an episode; a failed one has none."""
  if row["failed"]:
    return []
  made = [each["turn"] for each in row["observations"]]
  found = [Cut("stop", n, turn) for n, turn in enumerate(made)]
  if row["outcome"] == "answered" and row["searches"] < row["budget"]:
    turns = sum(span["author"] == "model" for span in row["spans"])
    found.append(Cut("continue", row["searches"], turns - 1))
  return found


def turns(row: Row) -> list[Turn]:
  """Returns the turns of an episode as the engine sampled them.

  Raises:
    ValueError: the row has no tokens.
  """
  tokens = row.get("tokens")
  if tokens is None:
    raise ValueError(
      f"The episode of {row['question_id']} was stored without its tokens; "
      "evaluate it again with this version."
    )
  texts = iter([s["text"] for s in row["spans"] if s["author"] == "model"])
  logps = iter(tokens["logps"])
  versions = itertools.chain.from_iterable(
    [version] * count for version, count in tokens["versions"]
  )
  found, start = [], 0
  for author, count in tokens["authors"]:
    if author == "model":
      sampled = aj.Generation(
        tuple(tokens["ids"][start : start + count]),
        tuple(itertools.islice(logps, count)),
        next(texts),
        aj.Finish.STOP,
        tuple(itertools.islice(versions, count)),
      )
      found.append(Turn(start, sampled))
    start += count
  return found


class _Replay:
  """An engine that returns given turns, and samples those that follow.

  Args:
    engine: samples.
    given: the turns to return, in order.
    known: the tokens that the policy has read by then, in place of those that
      a budget of fewer searches would have it read; None: as they are.
    address: of the episode, for its random numbers.
    asks: returns whether a turn's text asks for a search. The first turn that
      is sampled is sampled again until it does; None: once.
    tries: number of times that it is sampled at most.
  """

  def __init__(
    self,
    engine: aj.Engine,
    given: Sequence[aj.Generation],
    address: aj.Address,
    *,
    known: tuple[int, ...] | None = None,
    asks: Callable[[str], bool] | None = None,
    tries: int = 1,
  ):
    self._engine, self._given, self._known = engine, given, known
    self._asks, self._tries, self._read = asks, tries, 0
    # Of the turn that was sampled last.
    self.address = address
    # The turn that was sampled first, how often it was, and tokens discarded.
    self.first: aj.Generation | None = None
    self.sampled = self.discarded = 0
    self.context: tuple[int, ...] = ()

  async def generate(self, request: aj.GenerateRequest) -> aj.Generation:
    if request.turn < len(self._given):
      found = self._given[request.turn]
      self._read = len(request.token_ids) + len(found.token_ids)
      return found
    if self._known is not None:
      ids = self._known + request.token_ids[self._read :]
      request = dataclasses.replace(request, token_ids=ids)
    if self.first is not None:
      return await self._sample(request)
    self.context = request.token_ids
    while True:
      self.first = await self._sample(request)
      self.sampled += 1
      if self._asks is None or self._asks(self.first.text):
        return self.first
      if self.sampled == self._tries:
        return self.first
      self.discarded += len(self.first.token_ids)
      self.release(self.address)
      self.address = self.address._replace(attempt=self.sampled)

  async def _sample(self, request: aj.GenerateRequest) -> aj.Generation:
    request = dataclasses.replace(request, address=self.address)
    return await self._engine.generate(request)

  def release(self, address: aj.Address) -> None:
    self._engine.release(self.address)


async def _played(
  stored: Row,
  cut: Cut,
  sample: int,
  place: int,
  *,
  parts: aj.EpisodeParts,
  tries: int,
) -> dict[str, Any]:
  """Plays one end: refused, and granted too if no episode stores that."""
  env = parts.environment
  before = turns(stored)
  given = [turn.generation for turn in before[: cut.turn]]
  at = before[cut.turn]
  known = tuple(stored["tokens"]["ids"][: at.start])
  address = aj.evaluation_address(
    stored["question_id"], seed=stored["seed"], variant=place
  )._replace(sample=sample + 1)
  budget = aj.budgets.of_row(stored)

  async def play(engine: _Replay, allowed: aj.Budget) -> aj.Trajectory:
    return await aj.run_episode(
      aj.Question(
        stored["question_id"],
        stored["question"],
        tuple(stored["golden_answers"]),
        stored["corpus"],
        stored["metadata"],
      ),
      dataclasses.replace(parts, engine=engine),
      budget=allowed,
      scaffold=stored["scaffold"],
      address=address,
    )

  def asks(text: str) -> bool:
    action = env.action(text)
    return action is not None and (
      action.kind is aj.ActionKind.SEARCH
      and bool(action.content)
      and not (env.repeated and action.content in stored["queries"])
    )

  ends: dict[str, aj.Trajectory] = {}
  asked, tries_made, discarded = at.generation, 1, 0
  if cut.kind == "continue":
    replay = _Replay(parts.engine, given, address, asks=asks, tries=tries)
    granted = await play(replay, budget)
    if replay.first is not None:
      asked, address = replay.first, replay.address
      if replay.context != known:
        raise ValueError(
          f"The episode of {stored['question_id']} has tokens that differ from "
          "its text; name the policy that played it."
        )
    if granted.failed or (replay.first is not None and asks(asked.text)):
      ends["granted"] = granted
    tries_made, discarded = max(1, replay.sampled), replay.discarded
    if not ends and replay.first is not None:
      discarded += len(asked.token_ids)
  if cut.kind == "stop" or ("granted" in ends and not granted.failed):
    known = (*known, *asked.token_ids)
    refusing = _Replay(parts.engine, [*given, asked], address, known=known)
    allowed = dataclasses.replace(budget, searches=cut.searches)
    ends["refused"] = await play(refusing, allowed)
  return _row(stored, cut, sample, ends, env) | {
    "tries": tries_made,
    "discarded": discarded,
    "seen": _seen(stored, cut, before)._asdict(),
  }


def _seen(row: Row, cut: Cut, before: Sequence[Turn]) -> control.Seen:
  """Returns what a rule sees of the stored turn."""
  sampled = [turn.generation for turn in before[: cut.turn + 1]]
  written, last = sum(len(each.token_ids) for each in sampled), sampled[-1]
  made = row["queries"][: cut.searches]
  asked = row["queries"][cut.searches : cut.searches + 1]
  return control.Seen(
    cut.searches,
    min(row["budget"] - cut.searches, control.MOST_SEARCHES),
    written,
    written / len(sampled),
    int(bool(asked) and asked[0] in made),
    round(sum(last.logps) / len(last.logps), 5),
  )


def _row(
  stored: Row,
  cut: Cut,
  sample: int,
  ends: Mapping[str, aj.Trajectory],
  env: aj.Environment,
) -> dict[str, Any]:
  """Returns one end as plain values."""
  sampled: dict[str, dict[str, Any]] = {
    name: {
      "em": env.judge(trajectory).em,
      "searches": trajectory.searches,
      "tokens": trajectory.written_tokens,
      "outcome": trajectory.outcome.value,
      "spans": [
        {"author": span.author.name.lower(), "text": span.text}
        for span in trajectory.spans
      ],
    }
    for name, trajectory in ends.items()
  }
  outcomes = [one["outcome"] for one in sampled.values()]
  refused = sampled["refused"]["em"] if "refused" in sampled else None
  granted = sampled["granted"]["em"] if "granted" in sampled else None
  if cut.kind == "stop":
    granted = stored["em"]
  return {
    **{name: stored[name] for name in ("question_id", "budget", "seed")},
    "kind": cut.kind,
    "cut": cut.searches,
    "sample": sample,
    "reached": bool(sampled),
    "stored_em": stored["em"],
    "stored_tokens": stored["generated_tokens"],
    "worth": None if granted is None or refused is None else granted - refused,
    "gain": None
    if cut.kind == "stop" or granted is None
    else granted - stored["em"],
    "outcome": "failed" if "failed" in outcomes else (outcomes or [None])[0],
    "sampled": sampled,
  }


def _ends(
  path: pathlib.Path, places: Mapping[tuple[Any, ...], int], plan: Plan
) -> Iterator[tuple[Row, Cut, int, int]]:
  """Yields (episode, cut, sample, place) of the planned ends, in order."""
  for stored in aj.read_episodes(path):
    for cut in cuts(stored):
      first = places.get(_key(stored, cut.kind, cut.searches))
      if first is not None:
        for sample in range(plan.samples):
          yield stored, cut, sample, first + sample


def _places(path: pathlib.Path, plan: Plan) -> dict[tuple[Any, ...], int]:
  """Chooses episodes; returns the place of each cut's first end."""
  found: dict[str, list[tuple[int, list[tuple[Any, ...]]]]] = {
    kind: [] for kind in branch_values.KINDS
  }
  for row in aj.read_episodes(path):
    name = f"{row['question_id']}/{row['budget']}/{row['seed']}"
    for kind, chosen in found.items():
      own = [_key(row, *cut[:2]) for cut in cuts(row) if cut.kind == kind]
      if own:
        chosen.append((zlib.crc32(name.encode()), own))
  keys = [
    key
    for chosen in found.values()
    for _, own in sorted(chosen)[: plan.episodes or None]
    for key in own
  ]
  return {key: i * plan.samples for i, key in enumerate(keys)}


def _key(row: Row, kind: str, searches: int) -> tuple[Any, ...]:
  """Identifies a cut by its episode, kind and searches before it."""
  return row["question_id"], row["budget"], row["seed"], kind, searches


def define_flags() -> None:
  """Defines the command's flags; importing the module defines none."""
  flags.DEFINE_string("config", "configs/quickstart.py", "Of the evaluation.")
  flags.DEFINE_string("evaluation", None, "Its folder.", required=True)
  flags.DEFINE_string("policy", None, "Folder of its policy.", required=True)
  flags.DEFINE_string("output", None, "Folder.", required=True)
  flags.DEFINE_integer("episodes", 200, "Of each kind; 0: all.", lower_bound=0)
  flags.DEFINE_integer("samples", 4, "Ends of each cut.", lower_bound=1)
  flags.DEFINE_integer(
    "tries",
    16,
    "Turns sampled until one searches, at most; more narrow the bounds, and no "
    "other number depends on it.",
    lower_bound=1,
  )


def main(argv: Sequence[str]) -> None:
  if len(argv) > 1:
    raise app.UsageError(f"Unexpected argument {argv[1]!r}.")
  f = flags.FLAGS
  config, folder = load_config(f.config), pathlib.Path(f.output)
  world = aj.World()
  evaluation = pathlib.Path(f.evaluation)
  try:
    noted = json.loads((evaluation / "config.json").read_text())["episode"]
    episode = json.loads(json.dumps(dataclasses.asdict(config.episode)))
    if noted != episode:
      raise ValueError(
        f"{evaluation}: found episodes that were played with other settings of "
        f"episode than those of --config={f.config}; name that configuration."
      )
    policy = aj.load_policy(pathlib.Path(f.policy))
    asked = ("evaluation", "policy", "episodes", "samples", "tries")
    limits = {"max_generated": config.episode.max_generated}
    aj.claim_folder(
      folder, {"config.json": {name: f[name].value for name in asked} | limits}
    )
    if not (folder / BRANCHES).is_file():
      branch(
        aj.Playing(
          config.episode,
          aj.environment_of(config.episode),
          config.engine.slots,
        ),
        Plan(f.episodes, f.samples, f.tries),
        evaluation=evaluation,
        player=aj.Player(
          aj.make_engine(policy, config, seed=0), policy.tokenizer
        ),
        retriever=aj.LexicalRetriever(world.corpus, reads=world.searched),
        folder=folder,
      )
  except (OSError, ValueError) as error:
    sys.exit(f"research.branching: {error}")
  found = branch_values.summary(aj.read_episodes(folder / BRANCHES))
  (folder / "summary.json").write_text(json.dumps(found, indent=2))
  for kind, measured in found.items():
    value, low, high = (
      "-" if end is None else f"{end:+.3f}"
      for end in measured["worth"].values()
    )
    print(
      f"{kind}: a search that the policy asks for is worth {value} "
      f"[{low}, {high}], {measured['cuts']} cuts"
    )


if __name__ == "__main__":
  define_flags()
  app.run(main)
