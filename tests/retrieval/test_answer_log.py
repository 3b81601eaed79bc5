"""The answer log: several writers, killed writers, damage, other files."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import sqlite3
import subprocess
import sys
import textwrap

import pytest
import recorded

from anysearch_jax import types
from retrieval import recording


@pytest.fixture
def path(tmp_path):
  return tmp_path / "log" / "answers.sqlite"


WRITER = textwrap.dedent("""
  import asyncio, sys
  from anysearch_jax import types
  from retrieval import recording

  class Mine:
    async def search_many(self, requests):
      return [
        [types.Passage(r.query, me, "x" * 2000, 0.5)] for r in requests
      ]

  path, me, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
  tested = recording.Recorder(Mine(), path, mode="record", identity="w")
  for i in range(count):
    answer = asyncio.run(tested.search(types.SearchRequest(f"query {i}", 2)))
    print(f"query {i}", answer[0].title, flush=True)
  tested.close()
""")


def write(path, name, count):
  return subprocess.Popen(
    [sys.executable, "-c", WRITER, str(path), name, str(count)],
    stdout=subprocess.PIPE,
    text=True,
    cwd=os.path.dirname(os.path.dirname(os.path.dirname(__file__))),
  )


def test_writers_of_one_file_agree_on_every_answer(path):
  """All writers see the answer that was written first."""
  writers = [write(path, f"writer {i}", 60) for i in range(3)]
  seen = [
    dict(line.rsplit(" ", 2)[:1] + [line] for line in out.splitlines())
    for out in (writer.communicate(timeout=120)[0] for writer in writers)
  ]
  assert [writer.returncode for writer in writers] == [0, 0, 0]
  assert seen[0] == seen[1] == seen[2]
  assert len(seen[0]) == 60
  with recorded.recording(None, path, mode="strict", identity="w") as tested:
    for line in seen[0].values():
      query, name = line.rsplit(" writer ")
      (passage,) = asyncio.run(tested.search(recorded.ask(query, 2)))
      assert (passage.id, passage.title) == (query, f"writer {name}")


def test_answers_of_a_killed_writer_survive(path):
  writer = write(path, "writer", 100_000)
  seen = [writer.stdout.readline() for _ in range(40)]
  writer.send_signal(signal.SIGKILL)
  seen += writer.stdout.read().splitlines(keepends=True)
  writer.wait()
  done = [line.split(" writer")[0] for line in seen if line.endswith("\n")]
  assert len(done) >= 40
  with recorded.recording(None, path, mode="strict", identity="w") as tested:
    found = recorded.search(tested, *(recorded.ask(query, 2) for query in done))
    assert [answer[0].id for answer in found] == done
  # The next one goes on.
  with recorded.recording(
    recorded.Source(), path, mode="replay", identity="w"
  ) as tested:
    recorded.search(tested, recorded.ask("after", 2))
  with contextlib.closing(sqlite3.connect(path)) as database:
    assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def test_log_created_by_another_process_is_shared(path, monkeypatch):
  """A writer that finds no file and is overtaken uses the other's file."""
  link = os.link

  def overtaken(*names):
    monkeypatch.setattr(os, "link", link)
    with recorded.recording(recorded.Source(), path) as other:
      recorded.search(other, recorded.ask("a"))
    link(*names)

  monkeypatch.setattr(os, "link", overtaken)
  with recorded.recording(recorded.Source(), path) as tested:
    recorded.search(tested, recorded.ask("b"))
  with recorded.recording(None, path, mode="strict") as tested:
    assert recorded.search(tested, recorded.ask("a"), recorded.ask("b")) == [
      recorded.truth(recorded.ask("a")),
      recorded.truth(recorded.ask("b")),
    ]
  assert os.listdir(path.parent) == [path.name]


def test_answers_that_cannot_be_written_leave_nothing_behind(path):
  """A failed call writes nothing, and the log remains usable."""

  class Broken:
    async def search_many(self, requests):
      good, *_ = passages_found = [list(recorded.truth(r)) for r in requests]
      if requests[0].query == "a":
        good.append(types.Passage("id", "title", None))
        passages_found.reverse()
      return passages_found

  with recorded.recording(Broken(), path) as tested:
    with pytest.raises(AttributeError):
      recorded.search(tested, recorded.ask("a"), recorded.ask("b"))
    assert recorded.search(tested, recorded.ask("c")) == [
      recorded.truth(recorded.ask("c"))
    ]
  with recorded.recording(None, path, mode="strict") as tested:
    found = recorded.search(
      tested, recorded.ask("a"), recorded.ask("b"), recorded.ask("c")
    )
  assert [type(answer) for answer in found] == [
    recording.MissError,
    recording.MissError,
    tuple,
  ]


@pytest.mark.parametrize(
  ("content", "sentence"),
  [
    (b"", "found a database with application id"),
    (b"{}\n" * 1000, "file is not a database"),
    (None, "found a database with application id and version"),
  ],
  ids=["empty", "text", "another program's"],
)
@pytest.mark.parametrize("mode", ["record", "strict"])
def test_another_file_is_refused_and_left_alone(
  tmp_path, content, sentence, mode
):
  path = tmp_path / "other"
  if content is None:
    with contextlib.closing(sqlite3.connect(path)) as database:
      database.execute("CREATE TABLE answers (address)")
  else:
    path.write_bytes(content)
  before = path.read_bytes()
  with pytest.raises(types.RetrievalError, match=sentence):
    recording.Recorder(
      recorded.Source(), path, mode=mode, identity=recorded.WHO
    )
  assert path.read_bytes() == before
  assert os.listdir(tmp_path) == ["other"]


def test_log_in_a_read_only_folder_can_be_read(path, monkeypatch):
  with recorded.recording(recorded.Source(), path) as tested:
    recorded.search(tested, recorded.ask("a"))
  monkeypatch.setattr(os, "access", lambda *_: False)
  with recorded.recording(None, path, mode="strict") as tested:
    assert recorded.search(tested, recorded.ask("a")) == [
      recorded.truth(recorded.ask("a"))
    ]
    # No file of SQLite's own stands beside it.
    assert os.listdir(path.parent) == [path.name]


def test_damaged_log_never_gives_a_wrong_answer(path):
  """Each result is the recorded answer, a miss, or an error."""
  requests = [recorded.ask(f"query {i}") for i in range(40)]
  with recorded.recording(recorded.Source(), path) as tested:
    recorded.search(tested, *requests)
  whole = path.read_bytes()
  chance = random.Random(0)
  outcomes = {"answered": 0, "failed": 0}
  for _ in range(25):
    damaged = bytearray(whole)
    for _ in range(20):
      place = chance.randrange(len(whole))
      damaged[place] ^= 1 << chance.randrange(8)
    path.write_bytes(damaged)
    try:
      with recorded.recording(None, path, mode="strict") as tested:
        for request in requests:
          try:
            assert asyncio.run(tested.search(request)) == recorded.truth(
              request
            )
            outcomes["answered"] += 1
          except (types.RetrievalError, recording.MissError):
            outcomes["failed"] += 1
    except types.RetrievalError:
      outcomes["failed"] += 1
  assert outcomes["answered"] > 0
  assert outcomes["failed"] > 0
