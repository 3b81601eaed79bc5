"""What processes tell each other, with the others played by the test."""

from __future__ import annotations

import pickle

import jax
import numpy as np
import pytest
from jax.experimental import multihost_utils

from anysearch_jax import config as config_lib
from anysearch_jax import processes
from anysearch_jax.training import placement


def test_a_lone_process_calls_through():
  assert processes.first()
  assert processes.share(lambda: 3) == [3]
  assert processes.by_first(lambda: 3) == processes.together(lambda: 3) == 3
  for call in (processes.share, processes.by_first, processes.together):
    with pytest.raises(ZeroDivisionError):
      call(lambda: 1 / 0)


@pytest.fixture
def other(monkeypatch):
  """Makes this process 0 of two; the other answers what it is given here."""
  monkeypatch.setattr(jax, "process_count", lambda: 2)
  answers = []

  def gather(content):
    return [content, pickle.dumps(answers.pop(0))]

  monkeypatch.setattr(processes, "_gather", gather)
  return lambda value=None, error=None: answers.append((value, error))


def test_what_one_makes_all_know(other):
  other(5)
  assert processes.share(lambda: 3) == [3, 5]
  other(None)
  assert processes.by_first(lambda: "mine") == "mine"
  other(None)
  unpicklable = processes.together(lambda: lambda: 3)
  assert unpicklable() == 3


@pytest.mark.parametrize(
  "call", [processes.share, processes.by_first, processes.together]
)
def test_what_fails_in_one_fails_in_all(other, call):
  other(error=ValueError("no such policy"))
  with pytest.raises(ValueError, match="no such policy") as caught:
    call(lambda: 3)
  assert caught.value.__notes__ == ["Raised in process 1 of 2."]
  other(5)
  with pytest.raises(ZeroDivisionError) as caught:
    call(lambda: 1 / 0)
  assert caught.value.__notes__ == ["Raised in process 0 of 2."]


def test_an_error_that_cannot_be_sent_is_told(other):
  class LocalError(Exception):
    pass

  def fail():
    raise LocalError("a full disk")

  assert "a full disk" in str(
    pickle.loads(processes._pickled(None, LocalError("a full disk")))[1]
  )
  other(5)
  with pytest.raises(LocalError):  # As itself where it was raised.
    processes.share(fail)


@pytest.mark.parametrize("size", [1, 7, 8, 9, 16, 100])
def test_bytes_of_any_length_arrive_whole(monkeypatch, size):
  mine = bytes(np.random.default_rng(size).integers(0, 256, size, np.uint8))
  shapes = set()

  def allgather(x):
    shapes.add(x.shape)
    # The other process sends the same bytes, the last one cut off.
    theirs = x - 1 if x.ndim == 0 else x
    return np.stack([x, theirs])

  monkeypatch.setattr(processes, "_PIECE", 8)
  monkeypatch.setattr(multihost_utils, "process_allgather", allgather)
  assert processes._gather(mine) == [mine, mine[:-1]]
  # One shape for the lengths, one for all pieces, and no large one.
  assert len(shapes) == 2
  assert max(shapes) <= (8,)


def test_a_mesh_that_leaves_out_a_process_is_refused(monkeypatch):
  monkeypatch.setattr(jax, "process_count", lambda: 2)
  with pytest.raises(ValueError, match="leave out process 1 of 2; expected"):
    placement.training_mesh(config_lib.MeshConfig(fsdp=2))
  # A plan has devices of its own, whatever runs here.
  devices = jax.devices()
  mesh = placement.training_mesh(config_lib.MeshConfig(fsdp=2), devices)
  assert mesh.size == 2
