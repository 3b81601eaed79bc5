"""The contents of a line of episodes.jsonl."""

from __future__ import annotations

import dataclasses

import pytest
import scripted
from played_evaluation import configured, play, rows_of

from anysearch_jax import types
from anysearch_jax.evaluation import harness


def test_row_records_texts_tokens_and_cost(tmp_path):
  passages = [
    types.Passage("p1", "One", "text"),
    types.Passage("p2", "Two", "text"),
  ]
  config = configured(
    budgets=(2,),
    seeds=(3,),
    search_price=5.0,
    input_price=2.0,
    output_price=10.0,
  )
  engine = scripted.Engine([scripted.search("a"), scripted.answer("x")])
  _, text = play(
    config,
    harness.Player(engine, scripted.CODEC),
    [types.Question("nq/1", "?", ("x",), metadata={"dataset": "nq"})],
    scripted.Retriever({"a": passages}),
    tmp_path,
  )
  (row,) = rows_of(text)
  assert row["dataset"] == "nq"
  (shown,) = row["observations"]
  assert (shown["tool"], shown["argument"], shown["turn"]) == ("search", "a", 0)
  assert [types.Passage(**p) for p in shown["passages"]] == [
    dataclasses.replace(p, score=0.0) for p in passages
  ]
  first, second = (len(request.token_ids) for request in engine.requests)
  assert row["prompt_tokens"] == first
  assert row["input_tokens"] == first + second
  assert row["cost"] == pytest.approx(
    0.005 + (first + second) * 2e-6 + row["generated_tokens"] * 1e-5
  )
  tokens = row["tokens"]
  assert [author for author, _ in tokens["authors"]] == [
    "prompt",
    "model",
    "environment",
    "model",
  ]
  assert sum(n for _, n in tokens["authors"]) == len(tokens["ids"])
  assert tokens["ids"][:second] == list(engine.requests[1].token_ids)
  turns = [n for author, n in tokens["authors"] if author == "model"]
  assert sum(turns) == len(tokens["logps"]) == row["generated_tokens"]
  # The scripted engine reports a new version each turn, starting from 7.
  assert tokens["versions"] == [[7, turns[0]], [8, turns[1]]]
