"""Record and replay: the log has what a run saw, whatever happens to it."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import math
import os
import signal
import sqlite3
import stat
import struct
import textwrap
import uuid

import fake_retriever as fake
import hypothesis
import numpy as np
import pytest
import source_tree
from hypothesis import strategies as st

from anysearch_jax import types
from anysearch_jax.retrieval import recording

WHO = {"kind": "test", "corpus": "abc"}


ask = fake.ask


def truth(request, word="text"):
  """Returns the passages that `Source` finds, with float32 scores."""
  return tuple(
    types.Passage(
      f"{request.corpus}/{request.query}/{rank}",
      f'"{request.query}"',
      f"{word} {rank}",
      float(np.float32(1 / (rank + 3))),
    )
    for rank in range(request.k)
  )


class Source:
  """Answers by `truth`; queries with "bad" fail. `calls` has all requests."""

  def __init__(self, word="text"):
    self.calls, self.word = [], word

  async def search_many(self, requests):
    self.calls.append([request.query for request in requests])
    await asyncio.sleep(0)
    return [
      types.RetrievalError(f"No {request.query}.")
      if "bad" in request.query
      else truth(request, self.word)
      for request in requests
    ]


@contextlib.contextmanager
def recorder(retriever, path, mode="record", identity=WHO):
  yield recording.Recorder(retriever, path, mode=mode, identity=identity)


def search(tested, *requests):
  return asyncio.run(tested.search_many(requests))


def answered(path, *requests, retriever=None, **how):
  """Returns the answers of a recorder that is closed after them."""
  with recorder(retriever, path, **how) as tested:
    return search(tested, *requests)


# What is recorded is replayed.


@pytest.fixture
def path(tmp_path):
  return tmp_path / "log" / "answers.sqlite"


def bits(answers):
  """Returns answers as values that compare to the last bit."""

  def of(p):
    texts = [t.encode(errors="surrogatepass") for t in (p.id, p.title, p.text)]
    score = math.nan if math.isnan(p.score) else p.score
    return [*texts, struct.pack("<d", score)]

  return [list(map(of, answer)) for answer in answers]


TEXT = st.text(
  st.characters(codec=None) | st.sampled_from("\ud800\udfff\0\n\u2028"),
  max_size=20,
)
KEY = st.tuples(TEXT, st.integers(1, 5), TEXT)
SCORE = st.floats(width=32) | st.floats()
PASSAGE = st.builds(types.Passage, TEXT, TEXT, TEXT, SCORE)
PASSAGES = st.lists(PASSAGE, max_size=4)


class Given:
  """Answers each query with a given answer."""

  def __init__(self, answers):
    self.answers = answers

  async def search_many(self, requests):
    return [self.answers[r.query, r.k, r.corpus] for r in requests]


@hypothesis.settings(
  max_examples=15,
  deadline=None,
  suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
)
@hypothesis.given(answers=st.dictionaries(KEY, PASSAGES, max_size=6))
def test_what_was_recorded_is_replayed_to_the_last_bit(tmp_path, answers):
  """Covers lone surrogates, NaN, minus zero and empty answers."""
  path = tmp_path / uuid.uuid4().hex
  requests = [ask(*key) for key in answers]
  with recorder(Given(answers), path) as tested:
    found = search(tested, *requests)
    assert tested.counters["recorded"] == len(answers)
  assert bits(found) == bits(answers.values())
  with recorder(None, path, mode="strict") as tested:
    replayed = search(tested, *requests)
    assert tested.counters["hits"] == len(answers)
  assert bits(replayed) == bits(found)


def test_modes_ask_log_and_retriever_in_their_order(path):
  """The log first, the retriever first, or one of them only."""
  source = Source()
  for times in (1, 2):
    with recorder(source, path) as tested:
      assert search(tested, ask("a")) == [truth(ask("a"))]
      assert tested.counters["recorded"] == (times == 1)
  assert source.calls == [["a"]] * 2
  source.calls.clear()
  with recorder(source, path, mode="replay") as tested:
    asked = [ask(query) for query in ("b", "a", "c", "a")]
    assert search(tested, *asked) == [truth(request) for request in asked]
    assert (tested.counters["hits"], tested.counters["misses"]) == (2, 2)
  # What was missing went out as one call, and is there now.
  assert source.calls == [["b", "c"]]
  with recorder(source, path, mode="strict") as tested:
    assert search(tested, *asked) == [truth(request) for request in asked]
  assert source.calls == [["b", "c"]]


def test_miss_names_the_query(path):
  answered(path, ask("a"), retriever=Source())
  with recorder(None, path, mode="strict") as tested:
    hit, miss = search(tested, ask("a"), ask("Who is it?", 7, "wiki"))
    assert hit == truth(ask("a"))
    with pytest.raises(recording.MissError) as caught:
      asyncio.run(tested.search(ask("Who is it?", 7, "wiki")))
    assert str(caught.value) == str(miss)
  said = 'identity {"corpus":"abc","kind":"test"}'
  for part in (str(path), "'Who is it?'", "k=7", "corpus 'wiki'", said):
    assert part in str(miss)


@pytest.mark.parametrize(
  "other",
  [ask("A"), ask("a "), ask("a", 2), ask("a", corpus="x"), ask("")],
  ids=str,
)
def test_every_part_of_the_key_counts(path, other):
  answered(path, ask("a"), retriever=Source())
  (found,) = answered(path, other, mode="strict")
  assert isinstance(found, recording.MissError)


def test_without_a_retriever_the_only_identity_is_used(path):
  answered(path, ask("a"), retriever=Source())
  with recorder(None, path, mode="strict", identity=None) as tested:
    assert tested.identity() == WHO
    assert search(tested, ask("a")) == [truth(ask("a"))]
  with recorder(Source(), path, identity="another") as tested:
    search(tested, ask("a"))
  with pytest.raises(ValueError, match='"kind":"test".*"another"'):
    recording.Recorder(None, path, mode="strict")


def test_failures_are_answered_and_not_recorded(path):
  source = Source()
  with recorder(source, path) as tested:
    first, bad, last = search(tested, ask("a"), ask("bad"), ask("b"))
    assert (first, last) == (truth(ask("a")), truth(ask("b")))
    assert isinstance(bad, types.RetrievalError)
    assert tested.counters["failures"] == 1
  (miss,) = answered(path, ask("bad"), mode="strict")
  assert isinstance(miss, recording.MissError)


def test_a_retriever_that_raises_leaves_the_logs_answers(path):
  answered(path, ask("a"), retriever=Source())

  class Short:
    async def search_many(self, requests):
      return []

  with recorder(Short(), path, mode="replay") as tested:
    hit, failed = search(tested, ask("a"), ask("b"))
    assert hit == truth(ask("a"))
    assert "0 answers to 1" in str(failed)


def test_the_first_answer_stays(path):
  """So the log replays every run that was recorded with it."""
  with recorder(Source(), path) as tested:
    search(tested, ask("a"), ask("b"))
  with recorder(Source("other text"), path) as tested:
    expected = [truth(ask("a")), truth(ask("c"), "other text")]
    assert search(tested, ask("a"), ask("c")) == expected
    assert tested.counters["recorded"] == 1
  assert answered(path, ask("a"), mode="strict") == [truth(ask("a"))]


def test_loops_and_threads_share_a_recorder(path):
  asked = [[ask(f"{i % 5}/{j}") for j in range(10)] for i in range(20)]
  with recorder(Source(), path, mode="replay") as tested:
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
      found = list(pool.map(lambda some: search(tested, *some), asked))
    assert tested.counters["recorded"] == 50
    assert tested.counters["hits"] + tested.counters["misses"] == 200
  assert found == [[truth(r) for r in some] for some in asked]


# Several writers, killed writers, damage, other files.


WRITER = textwrap.dedent("""
  import asyncio, sys
  from anysearch_jax import types
  from anysearch_jax.retrieval import recording

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
""")


def write(path, name, count):
  return source_tree.started("-c", WRITER, path, name, count)


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
  with recorder(None, path, mode="strict", identity="w") as tested:
    for line in seen[0].values():
      query, name = line.rsplit(" writer ")
      (passage,) = asyncio.run(tested.search(ask(query, 2)))
      assert (passage.id, passage.title) == (query, f"writer {name}")


def test_answers_of_a_killed_writer_survive(path):
  writer = write(path, "writer", 100_000)
  seen = [writer.stdout.readline() for _ in range(40)]
  writer.send_signal(signal.SIGKILL)
  seen += writer.stdout.read().splitlines(keepends=True)
  writer.wait()
  done = [line.split(" writer")[0] for line in seen if line.endswith("\n")]
  assert len(done) >= 40
  asked = [ask(query, 2) for query in done]
  found = answered(path, *asked, mode="strict", identity="w")
  assert [answer[0].id for answer in found] == done
  # The next one goes on.
  with recorder(Source(), path, mode="replay", identity="w") as tested:
    search(tested, ask("after", 2))
  with contextlib.closing(sqlite3.connect(path)) as database:
    assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def test_answers_that_cannot_be_written_leave_nothing_behind(path):
  """A failed call writes nothing, and the log remains usable."""

  class Broken:
    async def search_many(self, requests):
      good, *_ = passages_found = [list(truth(r)) for r in requests]
      if requests[0].query == "a":
        good.append(types.Passage("id", "title", b"text"))
        passages_found.reverse()
      return passages_found

  with recorder(Broken(), path) as tested:
    with pytest.raises(TypeError):
      search(tested, ask("a"), ask("b"))
    assert search(tested, ask("c")) == [truth(ask("c"))]
  found = answered(path, ask("a"), ask("b"), ask("c"), mode="strict")
  missed = recording.MissError
  assert [type(answer) for answer in found] == [missed, missed, tuple]


@pytest.mark.parametrize(
  ("content", "sentence"),
  [
    (b"{}\n" * 1000, "file is not a database"),
    (None, "found a database without the table"),
  ],
  ids=["text", "another program's"],
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
    recording.Recorder(Source(), path, mode=mode, identity=WHO)
  assert path.read_bytes() == before
  assert os.listdir(tmp_path) == ["other"]


def test_log_in_a_read_only_folder_can_be_read(path):
  answered(path, ask("a"), retriever=Source())
  path.parent.chmod(0o555)
  try:
    with recorder(None, path, mode="strict") as tested:
      assert search(tested, ask("a")) == [truth(ask("a"))]
  finally:
    path.parent.chmod(0o755)
  # No file of SQLite's own stands beside it.
  assert os.listdir(path.parent) == [path.name]


def test_recorded_questions_are_for_the_user_alone(path):
  before = os.umask(0)
  try:
    with recorder(Source(), path) as tested:
      search(tested, ask("a"))
  finally:
    os.umask(before)
  assert stat.S_IMODE(path.stat().st_mode) == 0o600
