"""Handwritten trajectories and outcomes of groups."""

from __future__ import annotations

import numpy as np

from anysearch_jax import types
from anysearch_jax.algorithms import method as method_lib
from anysearch_jax.environment import protocol


def passage(id_: str, title: str = "", text: str = "") -> types.Passage:
  return types.Passage(id_, title, text)


def trajectory(
  question: types.Question,
  *turns: tuple[str, tuple[types.Passage, ...] | str | None],
  observation=protocol.observation,
) -> types.Trajectory:
  """Returns a trajectory of turns and the replies to them.

  The reply to a turn is passages if it was a charged search, the environment's
  line if the search was refused, and None if nothing followed.
  """
  spans, queries, shown = [], [], []
  for turn, (text, back) in enumerate(turns):
    spans.append(types.Span(types.Author.MODEL, text))
    if isinstance(back, tuple):
      queries.append(protocol.last_content(text, "search"))
      shown.append(types.Observation("search", queries[-1], turn, back))
      back = observation(back)
    if back is not None:
      spans.append(types.Span(types.Author.ENVIRONMENT, back))
  empty = np.zeros(0, np.int32)
  return types.Trajectory(
    types.Address(0, 0, 0),
    question,
    budget=4,
    scaffold=False,
    token_ids=empty,
    authors=empty.astype(np.int8),
    logps=empty.astype(np.float32),
    versions=empty,
    spans=tuple(spans),
    searches=len(queries),
    queries=tuple(queries),
    violation=False,
    outcome=types.Outcome.ANSWERED,
    observations=tuple(shown),
  )


def of_authors(q: int, g: int, authors, **changes) -> types.Trajectory:
  """Returns an answered trajectory whose tokens have these authors.

  Its ids say whose they are; log-probs are -1 and versions 0 at the model's
  tokens.
  """
  authors = np.asarray(authors, np.int8)
  model = authors == types.Author.MODEL
  values = {
    "address": types.Address(0, q, g),
    "question": types.Question(f"q{q}", "where?", ("tol",)),
    "budget": 2,
    "scaffold": False,
    "token_ids": np.arange(len(authors), dtype=np.int32) + 100 * q + 20 * g,
    "authors": authors,
    "logps": np.where(model, -1, 0).astype(np.float32),
    "versions": np.where(model, 0, -1).astype(np.int32),
    "spans": (),
    "searches": 0,
    "queries": (),
    "violation": False,
    "outcome": types.Outcome.ANSWERED,
  }
  return types.Trajectory(**values | changes)


def group(*trajectories: types.Trajectory) -> types.Group:
  first = trajectories[0]
  return types.Group(first.question, first.budget, False, trajectories)


def outcomes(em, *, measures=None, **changes) -> method_lib.Outcomes:
  """Returns outcomes of groups by their exact match, with default values.

  `f1` equals `em`; all are well formed, answered and valid, without a search.
  """
  em = np.asarray(em, np.float32)
  ones = np.ones(em.shape)
  values = {
    "em": em,
    "f1": em,
    "format": ones,
    "answered": ones == 1,
    "generated_tokens": ones,
    "searches": 0 * ones.astype(np.int32),
    "violation": ones == 0,
    "budget": np.full(em.shape[:-1], 4),
    "valid": ones == 1,
    "measures": measures or {},
  }
  for name, value in changes.items():
    values[name] = np.asarray(value, values[name].dtype)
  return method_lib.Outcomes(**values)


def drawn(rng, questions: int, group: int, *measures: str):
  """Draws random outcomes, some of them invalid; measures are 0 or 1."""
  shape = (questions, group)
  em = rng.random(shape) < rng.random((questions, 1))
  answered = em | (rng.random(shape) < 0.7)
  return outcomes(
    em,
    f1=np.where(em, 1, rng.random(shape) * answered),
    answered=answered,
    format=answered & (rng.random(shape) < 0.6),
    searches=rng.integers(0, 6, shape),
    budget=np.full(questions, 5),
    valid=rng.random(shape) < rng.choice([0.3, 0.9, 1.0], (questions, 1)),
    measures={name: rng.integers(0, 2, shape) for name in measures},
  )


def spoiled(told: method_lib.Outcomes) -> method_lib.Outcomes:
  """Returns the outcomes with NaN and extreme values where not valid."""

  def spoil(values, by):
    return np.where(told.valid, values, by)

  return told._replace(
    em=spoil(told.em, 1.0),
    f1=spoil(told.f1, np.nan),
    format=spoil(told.format, np.nan),
    answered=spoil(told.answered, True),
    searches=spoil(told.searches, -7),
    measures={k: spoil(v, np.nan) for k, v in told.measures.items()},
  )
