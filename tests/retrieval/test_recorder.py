"""Record and replay: the log always has exactly what a run saw."""

from __future__ import annotations

import asyncio
import concurrent.futures
import struct
import uuid

import hypothesis
import pytest
import recorded
from hypothesis import strategies as st

from anysearch_jax import types
from retrieval import recording


@pytest.fixture
def path(tmp_path):
  return tmp_path / "log" / "answers.sqlite"


def bits(answers):
  """Returns answers as values that compare to the last bit."""
  return [
    [
      [t.encode(errors="surrogatepass") for t in (p.id, p.title, p.text)]
      + [struct.pack("<d", p.score)]
      for p in answer
    ]
    for answer in answers
  ]


TEXT = st.text(
  st.characters(codec=None) | st.sampled_from("\ud800\udfff\0\n\u2028"),
  max_size=20,
)


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
@hypothesis.given(
  answers=st.dictionaries(
    st.tuples(TEXT, st.integers(1, 5), TEXT),
    st.lists(
      st.builds(
        types.Passage, TEXT, TEXT, TEXT, st.floats(width=32) | st.floats()
      ),
      max_size=4,
    ),
    max_size=6,
  )
)
def test_what_was_recorded_is_replayed_to_the_last_bit(tmp_path, answers):
  """Covers lone surrogates, NaN, minus zero and empty answers."""
  path = tmp_path / uuid.uuid4().hex
  requests = [recorded.ask(*key) for key in answers]
  with recorded.recording(Given(answers), path) as tested:
    found = recorded.search(tested, *requests)
    assert tested.counters["recorded"] == len(answers)
  assert bits(found) == bits(answers.values())
  with recorded.recording(None, path, mode="strict") as tested:
    replayed = recorded.search(tested, *requests)
    assert tested.counters["hits"] == len(answers)
  assert bits(replayed) == bits(found)


def test_modes_ask_log_and_retriever_in_their_order(path):
  """The log first, the retriever first, or one of them only."""
  source = recorded.Source()
  for times in (1, 2):
    with recorded.recording(source, path) as tested:
      assert recorded.search(tested, recorded.ask("a")) == [
        recorded.truth(recorded.ask("a"))
      ]
      assert tested.counters["recorded"] == (times == 1)
      assert tested.counters["conflicts"] == 0
  assert source.calls == [["a"]] * 2
  source.calls.clear()
  with recorded.recording(source, path, mode="replay") as tested:
    asked = [recorded.ask(query) for query in ("b", "a", "c", "a")]
    assert recorded.search(tested, *asked) == [
      recorded.truth(request) for request in asked
    ]
    assert (tested.counters["hits"], tested.counters["misses"]) == (2, 2)
  # What was missing went out as one call, and is there now.
  assert source.calls == [["b", "c"]]
  with recorded.recording(source, path, mode="strict") as tested:
    assert recorded.search(tested, *asked) == [
      recorded.truth(request) for request in asked
    ]
  assert source.calls == [["b", "c"]]


def test_miss_names_the_query(path):
  with recorded.recording(recorded.Source(), path) as tested:
    recorded.search(tested, recorded.ask("a"))
  with recorded.recording(None, path, mode="strict") as tested:
    hit, miss = recorded.search(
      tested, recorded.ask("a"), recorded.ask("Who is it?", 7, "wiki")
    )
    assert hit == recorded.truth(recorded.ask("a"))
    with pytest.raises(recording.MissError) as caught:
      asyncio.run(tested.search(recorded.ask("Who is it?", 7, "wiki")))
    assert str(caught.value) == str(miss)
  for part in (
    str(path),
    "'Who is it?'",
    "k=7",
    "corpus 'wiki'",
    'identity {"corpus":"abc","kind":"test"}',
  ):
    assert part in str(miss)


@pytest.mark.parametrize(
  "other",
  [
    recorded.ask("A"),
    recorded.ask("a "),
    recorded.ask("a", 2),
    recorded.ask("a", corpus="x"),
    recorded.ask(""),
  ],
  ids=str,
)
def test_every_part_of_the_key_counts(path, other):
  with recorded.recording(recorded.Source(), path) as tested:
    recorded.search(tested, recorded.ask("a"))
  with recorded.recording(None, path, mode="strict") as tested:
    (found,) = recorded.search(tested, other)
    assert isinstance(found, recording.MissError)


def test_without_a_retriever_the_only_identity_is_used(path):
  with recorded.recording(recorded.Source(), path) as tested:
    recorded.search(tested, recorded.ask("a"))
  with recorded.recording(None, path, mode="strict", identity=None) as tested:
    assert tested.identity() == recorded.WHO
    assert recorded.search(tested, recorded.ask("a")) == [
      recorded.truth(recorded.ask("a"))
    ]
  with pytest.raises(ValueError, match="pass the retriever's identity"):
    recording.Recorder(recorded.Source(), path, mode="record")
  with recorded.recording(
    recorded.Source(), path, identity="another"
  ) as tested:
    recorded.search(tested, recorded.ask("a"))
  with pytest.raises(ValueError, match='"kind":"test".*"another"'):
    recording.Recorder(None, path, mode="strict")


def test_failures_are_answered_and_not_recorded(path):
  source = recorded.Source()
  with recorded.recording(source, path) as tested:
    first, bad, last = recorded.search(
      tested, recorded.ask("a"), recorded.ask("bad"), recorded.ask("b")
    )
    assert (first, last) == (
      recorded.truth(recorded.ask("a")),
      recorded.truth(recorded.ask("b")),
    )
    assert isinstance(bad, types.RetrievalError)
    assert tested.counters["failures"] == 1
  with recorded.recording(None, path, mode="strict") as tested:
    (miss,) = recorded.search(tested, recorded.ask("bad"))
    assert isinstance(miss, recording.MissError)


def test_a_retriever_that_raises_leaves_the_logs_answers(path):
  with recorded.recording(recorded.Source(), path) as tested:
    recorded.search(tested, recorded.ask("a"))

  class Dead:
    async def search_many(self, requests):
      raise types.RetrievalError("It is down.")

  class Short:
    async def search_many(self, requests):
      return []

  for retriever, sentence in ((Dead(), "down"), (Short(), "0 answers to 1")):
    with recorded.recording(retriever, path, mode="replay") as tested:
      hit, failed = recorded.search(
        tested, recorded.ask("a"), recorded.ask("b")
      )
      assert hit == recorded.truth(recorded.ask("a"))
      assert sentence in str(failed)


def test_the_first_answer_stays_and_another_is_counted(path):
  """So the log replays every run that was recorded with it."""
  with recorded.recording(recorded.Source(), path) as tested:
    recorded.search(tested, recorded.ask("a"), recorded.ask("b"))
  with recorded.recording(recorded.Source("other text"), path) as tested:
    assert recorded.search(tested, recorded.ask("a"), recorded.ask("c")) == [
      recorded.truth(recorded.ask("a")),
      recorded.truth(recorded.ask("c"), "other text"),
    ]
    assert tested.counters["conflicts"] == 1
    assert tested.counters["recorded"] == 1
  with recorded.recording(None, path, mode="strict") as tested:
    assert recorded.search(tested, recorded.ask("a")) == [
      recorded.truth(recorded.ask("a"))
    ]


def test_loops_and_threads_share_a_recorder(path):
  asked = [[recorded.ask(f"{i % 5}/{j}") for j in range(10)] for i in range(20)]
  with recorded.recording(recorded.Source(), path, mode="replay") as tested:
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
      found = list(pool.map(lambda some: recorded.search(tested, *some), asked))
    assert tested.counters["recorded"] == 50
    assert tested.counters["hits"] + tested.counters["misses"] == 200
    assert tested.counters["conflicts"] == 0
  assert found == [[recorded.truth(r) for r in some] for some in asked]
