"""The HTTP client's validation of replies."""

from __future__ import annotations

import json
import math

import fake_retriever as fake
import httpx2
import hypothesis
import pytest
from hypothesis import strategies as st

from anysearch_jax import types
from anysearch_jax.host import http_calls
from retrieval import http_retriever


@pytest.fixture
def connect():
  with fake.clients() as start:
    yield start


GOOD = {"result": [[fake.hit("a", 0), fake.hit("a", 1)], [fake.hit("b", 0)]]}


def replied(connect, content):
  """Returns the results of two queries with k=2 for a given reply."""
  body = content if isinstance(content, bytes) else json.dumps(content).encode()
  retriever = connect(lambda request: httpx2.Response(200, content=body))
  return fake.search(retriever, fake.ask("a", 2), fake.ask("b", 2))


def with_hit(**changes):
  return {"result": [[fake.hit("a", 0) | changes], []]}


def with_document(**changes):
  return with_hit(document=fake.hit("a", 0)["document"] | changes)


LIES = {
  "nothing": (b"", "expected JSON"),
  "a page": (b"<html>Sign in</html>", "'<html>Sign in</html>'.*expected JSON"),
  "half": (json.dumps(GOOD).encode()[:-9], "expected JSON"),
  "latin-1": ('{"result": "é"}'.encode("latin-1"), "expected JSON"),
  "deep": (b"[" * 100_000, "expected JSON"),
  "NaN": (b'{"result": [[{"score": NaN}], []]}', "it says NaN"),
  "infinite": (b'{"result": [[{"score": -Infinity}], []]}', "says -Infinity"),
  "a list": ([], r"found \[\], expected an object with a list"),
  "an error": ({"error": "no index"}, "expected an object with a list"),
  "no list": ({"result": None}, "expected an object with a list"),
  "an answer less": ({"result": []}, "'0 answers', expected 1"),
  "an answer more": ({"result": [[], [], []]}, "'3 answers', expected 1"),
  "a mapping": ({"result": [{}, []]}, r"found \{\}, expected a list of hits"),
  "a hit more": (
    {"result": [[fake.hit("a", i) for i in range(3)], []]},
    "'3 hits', expected at most 2",
  ),
  "bare documents": (
    {"result": [[fake.hit("a", 0)["document"]], []]},
    'expected a hit such as {"document"',
  ),
  "texts": ({"result": [['"a"\ntext'], []]}, "expected a hit"),
  "a text document": (with_hit(document='"a"\ntext'), "expected a hit"),
  "no contents": (
    with_hit(document={"id": "1", "text": "a"}),
    "expected a hit",
  ),
  "half a pair": (with_document(contents="a\n\ud83d"), "expected a hit"),
  "no score": (with_hit(score=None), "found None, expected a finite score"),
  "a true score": (with_hit(score=True), "found True, expected a finite"),
  "a text score": (with_hit(score="0.5"), "expected a finite score"),
  "a score too large": (
    b'{"result": [[{"document": {"contents": "a"}, "score": 1e999}], []]}',
    "found inf, expected a finite score",
  ),
  "an integer too large": (with_hit(score=10**400), "expected a finite score"),
  "an id of a list": (with_document(id=[1]), r"found \[1\], expected an id"),
  "an id of a flag": (with_document(id=True), "found True, expected an id"),
  "half a pair as id": (
    with_document(id="\ud83d"),
    "expected an id of Unicode",
  ),
}


@pytest.mark.parametrize("name", LIES)
def test_malformed_reply_is_refused_and_quoted(connect, name):
  content, sentence = LIES[name]
  first, second = replied(connect, content)
  with pytest.raises(types.RetrievalError, match=sentence):
    raise first
  assert second == () or isinstance(second, types.RetrievalError)


def test_a_wrong_hit_fails_its_own_query_only(connect):
  retriever = connect(
    lambda request: httpx2.Response(200, json=with_hit(score=None))
  )
  first, second = fake.search(retriever, fake.ask("a", 2), fake.ask("b", 2))
  assert "expected a finite score" in str(first)
  assert second == ()
  assert len(retriever.sent) == 1
  assert retriever.counters["failures"] == 1


def test_replies_of_other_servers_are_accepted(connect):
  """BM25 of Search-R1 has no ids, others add keys, scores may ascend."""
  contents = "one line"
  found = replied(
    connect,
    {
      "result": [
        [
          {"document": {"contents": contents, "title": "t"}, "score": -1},
          {"document": {"contents": "a\nb\nc", "id": 7}, "score": 2.5, "x": 1},
        ],
        [{"document": {"contents": contents}, "score": 0}],
      ],
      "took": 3,
    },
  )
  (first, second), (third,) = found
  assert (first.title, first.text, first.score) == ("one line", "", -1.0)
  assert (second.id, second.title, second.text) == ("7", "a", "b\nc")
  # Passages without ids are identified by their contents.
  assert first.id == third.id != ""


PATHS = st.lists(st.integers(0, 5), max_size=6)


VALUES = st.recursive(
  st.none()
  | st.booleans()
  | st.integers()
  | st.floats()
  | st.text()
  | st.sampled_from(["\ud800", 10**400, -0.0, {"contents": "x"}]),
  lambda inner: (
    st.lists(inner, max_size=3)
    | st.dictionaries(
      st.sampled_from(["result", "document", "contents", "score", "id"]),
      inner,
      max_size=3,
    )
  ),
  max_leaves=5,
)


def mutated(value, path, new):
  """Returns a copy of JSON `value` with `new` at `path`."""
  if not path or not isinstance(value, dict | list) or not value:
    return new
  keys = list(value) if isinstance(value, dict) else range(len(value))
  key = keys[path[0] % len(keys)]
  pairs = [
    (k, mutated(value[k], path[1:], new) if k == key else value[k])
    for k in keys
  ]
  return dict(pairs) if isinstance(value, dict) else [v for _, v in pairs]


@st.composite
def replies(draw):
  value = GOOD
  for _ in range(draw(st.integers(1, 3))):
    value = mutated(value, draw(PATHS), draw(VALUES))
  data = json.dumps(value).encode()
  if draw(st.booleans()):
    place = draw(st.integers(0, len(data)))
    data = data[:place] + draw(st.binary(max_size=3)) + data[place + 1 :]
  return data


@pytest.fixture(scope="module")
def repeats():
  """Makes a client of a server with a settable reply."""
  told = {}
  retriever = http_retriever.HttpRetriever(
    fake.URL,
    patience=http_calls.Patience(failures=1_000_000),
    transport=httpx2.MockTransport(
      lambda request: httpx2.Response(200, content=told["reply"])
    ),
  )
  yield told, retriever
  retriever.close()


@hypothesis.settings(max_examples=300, deadline=None)
@hypothesis.given(reply=replies())
def test_any_reply_yields_valid_passages_or_errors(repeats, reply):
  told, retriever = repeats
  told["reply"] = reply
  found = fake.search(retriever, fake.ask("a", 2), fake.ask("b", 2))
  assert len(found) == 2
  for answer in found:
    if isinstance(answer, types.RetrievalError):
      continue
    assert isinstance(answer, tuple)
    assert len(answer) <= 2
    for passage in answer:
      assert type(passage) is types.Passage
      for text in (passage.id, passage.title, passage.text):
        assert isinstance(text, str)
        text.encode()
      assert "\n" not in passage.title
      assert type(passage.score) is float
      assert math.isfinite(passage.score)
