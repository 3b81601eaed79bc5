"""Training over several epochs, each in another order, with a resume."""

from __future__ import annotations

import json

import pytest
import small_run

from anysearch_jax.data import dataset_iterator
from anysearch_jax.training import checkpoint


@pytest.fixture(scope="module")
def parts():
  return small_run.parts()


def _stream(parts, *, key=7, questions=6):
  """Returns a stream of 16 questions, four rollouts, over six distinct ones."""
  rows = parts["questions"][:questions]
  return parts | {"questions": dataset_iterator.Stream(rows, count=16, key=key)}


@pytest.fixture(scope="module")
def resumed(tmp_path_factory, parts):
  """Returns a run that was killed in its third rollout and resumed."""
  folder = tmp_path_factory.mktemp("run")
  small_run.train(folder, _stream(parts), rollouts=3)
  small_run.train(folder, _stream(parts))
  return folder


def test_resumed_run_takes_the_streams_questions(resumed, parts):
  order, _ = dataset_iterator.take(dataset_iterator.Cursor(0, 7, 0), 16, of=6)
  for rollout in (1, 3):
    path = resumed / "trajectories" / f"rollout-{rollout:05d}.jsonl"
    groups = map(json.loads, path.read_text().splitlines())
    assert [group["question_id"] for group in groups] == [
      parts["questions"][row].id for row in order[4 * rollout :][:4]
    ]


def test_the_cursor_is_in_the_metrics_and_the_checkpoint(resumed):
  lines = (resumed / "metrics.jsonl").read_text().splitlines()
  values = map(json.loads, lines)
  assert [(v["data/epoch"], v["data/position"]) for v in values] == [
    (0, 4),
    (1, 2),
    (2, 0),
    (2, 4),
  ]
  for rollout, place in ((2, (1, 2)), (4, (2, 4))):
    progress = checkpoint.read_json(
      resumed / "checkpoints", rollout, "progress"
    )
    epoch, position = place
    assert progress["questions"] == {
      "epoch": epoch,
      "key": 7,
      "position": position,
      "of": 6,
    }


@pytest.mark.parametrize("change", [{"key": 8}, {"questions": 5}])
def test_resuming_with_another_stream_is_rejected(resumed, parts, change):
  with pytest.raises(checkpoint.MismatchError, match="questions.*'key'"):
    small_run.train(resumed, _stream(parts, **change))
