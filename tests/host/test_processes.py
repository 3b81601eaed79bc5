"""Tests exchanges between processes; the test plays the other processes."""

from __future__ import annotations

import io
import json
import re
import sys
import tracemalloc
from concurrent import futures

import jax
import numpy as np
import pytest
from jax.experimental import multihost_utils

from anysearch_jax import config as config_lib
from anysearch_jax import types
from anysearch_jax.host import http_calls, processes
from anysearch_jax.policy import sharding


def test_a_lone_process_calls_through():
  assert processes.is_main()
  assert processes.all_gather(lambda: 3) == [3]
  assert processes.on_main(lambda: 3) == processes.barrier_call(lambda: 3) == 3
  for call in (processes.all_gather, processes.on_main, processes.barrier_call):
    with pytest.raises(ZeroDivisionError):
      call(lambda: 1 / 0)


def test_a_thread_that_works_alone_calls_through(monkeypatch):
  """In the second of two processes; other threads go on together."""
  monkeypatch.setattr(jax, "process_count", lambda: 2)
  monkeypatch.setattr(jax, "process_index", lambda: 1)
  with processes.alone():
    with processes.alone():
      pass
    assert processes.is_main()
    assert (processes.index(), processes.count()) == (0, 1)
    assert processes.on_main(lambda: 3) == 3
    assert processes.all_gather(lambda: 3) == [3]
    with futures.ThreadPoolExecutor(1) as pool:
      assert pool.submit(processes.count).result() == 2
  assert (processes.index(), processes.count()) == (1, 2)
  assert not processes.is_main()


@pytest.fixture
def other(monkeypatch):
  """Plays the second of two processes; returns a setter of its value."""
  monkeypatch.setattr(jax, "process_count", lambda: 2)
  answers = []

  def gather(content):
    return [content, answers.pop(0)]

  def answer(value=None, error=None):
    answers.append(processes.encode(value, error))

  monkeypatch.setattr(processes, "_gather", gather)
  monkeypatch.setattr(processes, "_broadcast", lambda content, length: content)
  return answer


def test_values_of_each_process_reach_all(other):
  other(5)
  assert processes.all_gather(lambda: 3) == [3, 5]
  other(None)
  assert processes.on_main(lambda: "mine") == "mine"
  other(None)
  never_sent = processes.barrier_call(lambda: lambda: 3)
  assert never_sent() == 3


@pytest.mark.parametrize(
  "value",
  [
    None,
    True,
    -(2**70),
    0.1,
    float("-inf"),
    "é \ud800 \0",
    [],
    {},
    {"a": [1, {"b": None}], "": "x"},
    {"\0array": 0, "b": 1},
  ],
)
def test_plain_values_arrive_unchanged(other, value):
  other(value)
  mine, theirs = processes.all_gather(lambda: value)
  assert mine == theirs == value
  assert json.dumps(theirs) == json.dumps(value)


@pytest.mark.parametrize("dtype", [np.int8, np.int64, np.float32, bool])
@pytest.mark.parametrize("shape", [(), (0,), (2, 3)])
def test_arrays_arrive_bit_for_bit(other, dtype, shape):
  rng = np.random.default_rng(0)
  array = np.asarray(rng.integers(0, 2, shape)).astype(dtype)
  other(0)
  mine, _ = processes.all_gather(lambda: {"x": [array, {"y": array.T}]})
  (x, inner) = mine["x"]
  for found, expected in ((x, array), (inner["y"], array.T)):
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    assert found.tobytes() == expected.tobytes()


@pytest.mark.parametrize(
  "value", [object(), {1, 2}, b"x", np.asarray([object()]), lambda: 3]
)
def test_values_that_would_need_pickling_are_refused(other, value):
  other(5)
  with pytest.raises(TypeError, match="nothing else is shared") as caught:
    processes.all_gather(lambda: [value])
  assert caught.value.__notes__ == ["Raised in process 0 of 2."]


@pytest.mark.parametrize(
  "call", [processes.all_gather, processes.on_main, processes.barrier_call]
)
def test_an_error_in_one_process_is_raised_in_all(other, call):
  other(error=ValueError("no such policy"))
  with pytest.raises(ValueError, match="no such policy") as caught:
    call(lambda: 3)
  assert caught.value.__notes__ == ["Raised in process 1 of 2."]
  other(5)
  with pytest.raises(ZeroDivisionError) as caught:
    call(lambda: 1 / 0)
  assert caught.value.__notes__ == ["Raised in process 0 of 2."]


class _OtherError(Exception):
  """An error of a module that the receiver does not know."""


class _OddError(ValueError):
  """An error whose constructor does not take its message."""

  def __init__(self, code, *, reason):
    super().__init__(f"{reason} ({code})")


@pytest.mark.parametrize(
  ("error", "kind", "words"),
  [
    (OSError(28, "No space", "a.txt"), OSError, "[Errno 28] No space: 'a.txt'"),
    (types.EngineError("gone"), types.EngineError, "gone"),
    (http_calls.AnswerError("not JSON"), http_calls.AnswerError, "not JSON"),
    # An error of a library arrives as its nearest built-in base.
    (json.JSONDecodeError("odd", "{", 0), ValueError, "JSONDecodeError: odd"),
    (_OddError(3, reason="x"), ValueError, "_OddError: x (3)"),
    (_OtherError("a full disk"), RuntimeError, "_OtherError: a full disk"),
    (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"), ValueError, "bad"),
    (ExceptionGroup("two", [KeyError("a")]), RuntimeError, "two"),
  ],
)
def test_an_error_arrives_with_its_class_and_message(other, error, kind, words):
  other(error=error)
  with pytest.raises(kind, match=re.escape(words)):
    processes.all_gather(lambda: 3)


def test_a_received_error_cannot_name_anything_but_an_error_class():
  """Only error classes of modules that are already imported are used."""
  for classes in (
    [["os", "system"]],
    [["builtins", "exec"]],
    [["builtins", "print"]],
    [["builtins", "SystemExit"]],
    [["anysearch_jax.host.processes", "all_gather"]],
    [["anysearch_jax.nowhere", "Error"]],
    [["this", "Error"]],
  ):
    error = processes.rebuild_error({"classes": classes, "text": "x"})
    assert type(error) is RuntimeError
  assert "this" not in sys.modules


def _npz():
  file = io.BytesIO()
  np.savez(file, x=np.zeros(3, np.int8))
  return file.getvalue()


def _claiming(shape, dtype="|u1"):
  """Returns an array of one byte whose header claims another shape."""
  file = io.BytesIO()
  header = {"descr": dtype, "fortran_order": False, "shape": shape}
  np.lib.format.write_array_header_1_0(file, header)
  return file.getvalue() + b"1"


def _json(text):
  file = io.BytesIO()
  np.save(file, np.frombuffer(text, np.uint8))
  return file.getvalue()


@pytest.mark.parametrize(
  "content",
  [
    b"",
    b"x",
    _npz(),
    processes.encode(1) + _npz(),
    processes.encode(1)[:-1],
    _claiming((10**12,)),
    _claiming((2**40, 2**40)),
    _claiming((-1,)),
    _claiming((2,), "|O"),
    _claiming((2,), "|V0"),
    _claiming((1,), "|S1"),
    _json(b"[1"),
    _json(b"1"),
    _json(b'[{"\\u0000array": 5}, null]'),
    _json(b'[{"\\u0000array": "x"}, null]'),
    _json(b"[" * 100_000),
  ],
)
def test_a_message_of_another_form_is_refused_before_it_takes_memory(content):
  tracemalloc.start()
  try:
    with pytest.raises(ValueError, match="Found a message of .* expected one"):
      processes.decode(content)
    assert tracemalloc.get_traced_memory()[1] < 2 * 10**7
  finally:
    tracemalloc.stop()


@pytest.mark.parametrize("size", [1, 7, 8, 9, 100])
def test_bytes_of_any_length_arrive_whole(monkeypatch, size):
  mine = bytes(np.random.default_rng(size).integers(0, 256, size, np.uint8))
  shapes = set()

  def allgather(x):
    shapes.add(x.shape)
    # The other process sends the same bytes without the last one.
    theirs = x - 1 if x.ndim == 0 else x
    return np.stack([x, theirs])

  monkeypatch.setattr(processes, "_PIECE_BYTES", 8)
  monkeypatch.setattr(multihost_utils, "process_allgather", allgather)
  assert processes._gather(mine) == [mine, mine[:-1]]
  # One shape for the lengths and one for all pieces; neither is large.
  assert len(shapes) == 2
  assert max(shapes) <= (8,)


@pytest.mark.parametrize("size", [1, 8, 100])
def test_what_the_first_process_sends_arrives_whole(monkeypatch, size):
  """The test is the second process; it computes nothing."""
  array = np.random.default_rng(size).integers(0, 256, size, np.uint8)
  content = processes.encode({"x": [array]})
  pieces = iter(processes._pieces(content, len(content)))
  monkeypatch.setattr(
    multihost_utils, "broadcast_one_to_all", lambda piece: next(pieces)
  )
  monkeypatch.setattr(jax, "process_count", lambda: 2)
  monkeypatch.setattr(jax, "process_index", lambda: 1)
  lengths = [processes.encode(len(content)), processes.encode(0)]
  monkeypatch.setattr(processes, "_gather", lambda mine: lengths)
  (received,) = processes.on_main(lambda: 1 / 0)["x"]
  np.testing.assert_array_equal(received, array)
  assert next(pieces, None) is None


def test_a_mesh_that_leaves_out_a_process_is_refused(monkeypatch):
  monkeypatch.setattr(jax, "process_count", lambda: 2)
  with pytest.raises(ValueError, match="leave out process 1 of 2; expected"):
    sharding.training_mesh(config_lib.MeshConfig(fsdp=2))
  # The planner passes its own devices, so no process is left out.
  devices = jax.devices()
  mesh = sharding.training_mesh(config_lib.MeshConfig(fsdp=2), devices)
  assert mesh.size == 2
