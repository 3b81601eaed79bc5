"""Finds turns at which a stored episode can branch, and restores its state."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from anysearch_jax import budgets, types
from anysearch_jax import config as config_lib
from anysearch_jax.environment import observed, protocol, spec
from anysearch_jax.evaluation import journal
from anysearch_jax.methods import systems
from anysearch_jax.rollout import episode_state


class BranchPoint(NamedTuple):
  """A branch point of a stored episode.

  Attributes:
    kind: `continue` or `stop`, see `branching`.
    searches: number of searches that were charged before.
    turn: index of the model turn that is sampled again.
  """

  kind: str
  searches: int
  turn: int


def of(row: journal.Row, env: spec.Environment) -> list[BranchPoint]:
  """Returns the branch points of an episode; a failed one has none.

  Raises:
    ValueError: the environment verifies answers.
  """
  if env.verification is not None:
    raise ValueError(
      "episode.prompts: found an environment that verifies answers, whose "
      "episodes cannot branch; expected one without (bats, not bats_verify)."
    )
  if row["failed"]:
    return []
  turns = _turns(row, env)
  searched = [i for i, turn in enumerate(turns) if turn.charged]
  found = [BranchPoint("stop", n, turn) for n, turn in enumerate(searched)]
  used = row["searches"] + _lost(turns[:-1], env)
  if row["outcome"] == "answered" and used < row["budget"]:
    found.append(BranchPoint("continue", row["searches"], len(turns) - 1))
  return found


def restore(
  row: journal.Row,
  point: BranchPoint,
  *,
  config: config_lib.EpisodeConfig,
  codec: types.TextCodec,
) -> episode_state.Episode:
  """Restores the episode's state before the turn of a branch point.

  Args:
    row: the stored episode.
    point: one of `of(row, env)`.
    config: configuration of its evaluation.
    codec: codec of the policy that played it.

  Returns:
    The state for `episode.resume_turn`.

  Raises:
    ValueError: the row has no tokens, or those of another tokenizer.
  """
  chunks = _chunks(row, codec)
  models = [i for i, c in enumerate(chunks) if c.author is types.Author.MODEL]
  end = models[point.turn]
  if row["scaffold"]:
    end -= 1  # Drop the turn's budget line; `resume_turn` writes a new one.
  env = systems.of_episode(config)
  before = _turns(row, env)[: point.turn]
  ends = [
    sum(len(chunk.token_ids) for chunk in chunks[: place + 1]) - 1
    for place, turn in zip(models, before, strict=False)
    if turn.charged
  ]
  return episode_state.Episode(
    types.Address(0, 0, 0),
    types.Question(
      row["question_id"],
      row["question"],
      tuple(row["golden_answers"]),
      row["corpus"],
      row["metadata"],
    ),
    row["budget"],
    row["scaffold"],
    config,
    codec,
    chunks=tuple(chunks[:end]),
    queries=tuple(row["queries"][: point.searches]),
    observations=observed.from_values(row)[: point.searches],
    search_ends=tuple(ends),
    bad_turns=sum(not turn.charged for turn in before),
    violation=any(turn.beyond for turn in before),
    caps=budgets.from_record(row.get("caps", {})),
  )


def stored_turn(
  row: journal.Row, point: BranchPoint, *, codec: types.TextCodec
) -> types.Generation:
  """Returns the turn at a branch point as the engine sampled it.

  Raises:
    ValueError: as `restore`.
  """
  chunks = _chunks(row, codec)
  models = [c for c in chunks if c.author is types.Author.MODEL]
  turn = models[point.turn]
  return types.Generation(
    turn.token_ids, turn.logps, turn.text, types.Finish.STOP, turn.versions
  )


class _Turn(NamedTuple):
  """Whether a turn was charged a search, or tried one beyond the budget."""

  charged: bool
  beyond: bool


def _turns(row: journal.Row, env: spec.Environment) -> list[_Turn]:
  """Classifies each model turn, in order."""
  found: list[_Turn] = []
  for span in row["spans"]:
    if span["author"] != "model":
      continue
    query = _query(span["text"], env)
    charged = sum(turn.charged for turn in found)
    beyond = bool(query) and charged + _lost(found, env) >= row["budget"]
    again = bool(env.repeated) and query in row["queries"][:charged]
    found.append(_Turn(bool(query) and not beyond and not again, beyond))
  return found


def _query(text: str, env: spec.Environment) -> str:
  """Returns the query of a turn, "" if it does not search."""
  match env.action(text):
    case protocol.Action(protocol.ActionKind.SEARCH, query):
      return query
  return ""


def _lost(turns: Sequence[_Turn], env: spec.Environment) -> int:
  """Returns the number of searches used up by turns without a search."""
  return env.turns_are_budget * sum(not turn.charged for turn in turns)


def _chunks(
  row: journal.Row, codec: types.TextCodec
) -> list[episode_state.Chunk]:
  """Returns all chunks of an episode with their stored tokens.

  Environment texts are encoded again to find the end of each; the ids must
  equal the stored ones.
  """
  tokens = row.get("tokens")
  if tokens is None:
    raise ValueError(
      f"The episode of {row['question_id']} was stored without its tokens; "
      "evaluate it again with this version."
    )
  ids, logps = iter(tokens["ids"]), iter(tokens["logps"])
  versions = itertools.chain.from_iterable(
    [v] * n for v, n in tokens["versions"]
  )
  counts = iter([n for author, n in tokens["authors"] if author == "model"])

  def given(author: types.Author, text: str, count: int) -> episode_state.Chunk:
    taken = tuple(itertools.islice(ids, count))
    return episode_state.Chunk(
      author, taken, (0.0,) * count, (-1,) * count, text
    )

  chunks = [given(types.Author.PROMPT, "", row["prompt_tokens"])]
  for span in row["spans"]:
    if span["author"] == "model":
      n = next(counts)
      chunks.append(
        episode_state.Chunk(
          types.Author.MODEL,
          tuple(itertools.islice(ids, n)),
          tuple(itertools.islice(logps, n)),
          tuple(itertools.islice(versions, n)),
          span["text"],
        )
      )
      continue
    known = codec.encode(span["text"])
    chunks.append(given(types.Author.ENVIRONMENT, span["text"], len(known)))
    if list(chunks[-1].token_ids) != known:
      raise ValueError(
        f"The episode of {row['question_id']} has tokens that differ from its "
        "text; name the policy that played it."
      )
  return chunks
