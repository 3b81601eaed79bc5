"""Turns at which a stored episode can be taken up, and how it stood there."""

from __future__ import annotations

import itertools
from typing import NamedTuple

from anysearch_jax import config as config_lib
from anysearch_jax import protocol, types
from anysearch_jax.evaluation import journal
from anysearch_jax.rollout import episode_state


class Cut(NamedTuple):
  """Where a stored episode is taken up.

  searches: that were charged before. turn: the one that is sampled again.
  """

  kind: str
  searches: int
  turn: int


def of(row: journal.Row) -> list[Cut]:
  """Where an episode can be taken up; failed ones nowhere."""
  if row["failed"]:
    return []
  turns = _turns(row)
  searched = [i for i, (_, charged) in enumerate(turns) if charged]
  found = [Cut("stop", n, turn) for n, turn in enumerate(searched)]
  if row["outcome"] == "answered" and row["searches"] < row["budget"]:
    found.append(Cut("continue", row["searches"], len(turns) - 1))
  return found


def take_up(
  row: journal.Row,
  cut: Cut,
  *,
  config: config_lib.EpisodeConfig,
  codec: types.TextCodec,
) -> episode_state.Episode:
  """The episode as it stood before a turn.

  Args:
    row: of the episode.
    cut: one of `of(row)`.
    config: of its evaluation.
    codec: of the policy that played it.

  Returns:
    For `episode.go_on`; with `stop`, its budget is used up.

  Raises:
    ValueError: a row without tokens, or with those of another tokenizer.
  """
  chunks = _chunks(row, codec)
  models = [i for i, c in enumerate(chunks) if c.author is types.Author.MODEL]
  end = models[cut.turn]
  if row["scaffold"]:
    end -= 1  # The turn gets a budget line of its own.
  before = _turns(row)[: cut.turn]
  return episode_state.Episode(
    types.Address(0, 0, 0),
    types.Question(
      row["question_id"],
      row["question"],
      tuple(row["golden_answers"]),
      row["corpus"],
      row["metadata"],
    ),
    cut.searches if cut.kind == "stop" else row["budget"],
    row["scaffold"],
    config,
    codec,
    chunks=tuple(chunks[:end]),
    queries=tuple(row["queries"][: cut.searches]),
    documents=tuple(
      tuple(types.Document(**d) for d in found)
      for found in row["documents"][: cut.searches]
    ),
    bad_turns=sum(not charged for _, charged in before),
    violation=any(_searches(text) and not charged for text, charged in before),
  )


def _turns(row: journal.Row) -> list[tuple[str, bool]]:
  """The text of each turn, and whether it was charged for a search."""
  spans = row["spans"]
  answers = [*spans[1:], {"author": "", "text": ""}]
  return [
    (span["text"], "<information>" in answer["text"])
    for span, answer in zip(spans, answers, strict=True)
    if span["author"] == "model"
  ]


def _searches(text: str) -> bool:
  action = protocol.last_action(text)
  return (
    action is not None
    and action.kind is protocol.ActionKind.SEARCH
    and bool(action.content)
  )


def _chunks(
  row: journal.Row, codec: types.TextCodec
) -> list[episode_state.Chunk]:
  """The whole episode; what the environment wrote is encoded as it was then."""
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
          *(tuple(itertools.islice(x, n)) for x in (ids, logps, versions)),
          span["text"],
        )
      )
      continue
    known = codec.encode(span["text"])
    chunks.append(given(types.Author.ENVIRONMENT, span["text"], len(known)))
    if list(chunks[-1].token_ids) != known:
      raise ValueError(
        f"The episode of {row['question_id']} has other tokens than its text; "
        "name the policy that played it."
      )
  return chunks
