"""The client of reranking servers, against both formats over HTTP."""

from __future__ import annotations

import asyncio
import json

import httpx2
import pytest

from anysearch_jax import types
from anysearch_jax.host import http_calls
from anysearch_jax.retrieval import served_reranker as served

QUICK = http_calls.Patience(deadline=10.0, retries=1, pause=0.001)
ASKED = [("q", ["aaa", "b", "cc"]), ("word", ["dddd"])]
SCORES = [[3.0, 1.0, 2.0], [4.0]]


class Server:
  """Scores texts by length; answers best first, as real servers do."""

  def __init__(self, answer, most=32):
    self.answer, self.most, self.seen = answer, most, []

  def __call__(self, request):
    body = json.loads(request.content)
    self.seen.append((str(request.url), request.headers, body))
    texts = body.get("texts", body.get("documents"))
    if len(texts) > self.most:
      return httpx2.Response(413, json={"error": "batch too large"})
    return self.answer(sorted(enumerate(texts), key=lambda x: -len(x[1])))


def tei(ranked):
  """Answers as text-embeddings-inference does."""
  return httpx2.Response(
    200, json=[{"index": i, "score": float(len(t))} for i, t in ranked]
  )


def jina(ranked):
  """Answers as Jina, Cohere, vLLM and Infinity do."""
  results = [{"index": i, "relevance_score": len(t)} for i, t in ranked]
  return httpx2.Response(200, json={"results": results, "usage": {}})


def reranker(server, **options):
  options |= {"patience": QUICK, "transport": httpx2.MockTransport(server)}
  return served.ServedReranker("http://ranker:8080/", **options)


def scores(made, asked=ASKED):
  try:
    return asyncio.run(made.scores(asked))
  finally:
    made.close()


def test_text_embeddings_inference_is_asked_in_its_format():
  server = Server(tei)
  assert scores(reranker(server)) == SCORES
  url, _, body = server.seen[0]
  assert url == "http://ranker:8080/rerank"
  asked = {"query": "q", "texts": ["aaa", "b", "cc"]}
  assert body == asked | {"raw_scores": True, "truncate": True}


def test_servers_with_models_are_asked_in_theirs(monkeypatch):
  monkeypatch.setenv("RANK_KEY", "secret")
  server = Server(jina)
  made = reranker(server, model="bge", key_variable="RANK_KEY")
  assert scores(made) == SCORES
  assert made.identity()["model"] == "bge"
  _, headers, body = server.seen[0]
  assert body["model"] == "bge" and body["documents"] == ["aaa", "b", "cc"]
  assert headers["authorization"] == "Bearer secret"


def test_many_passages_are_asked_in_parts():
  texts = ["x" * n for n in range(1, 101)]
  server = Server(tei)
  (found,) = scores(reranker(server), [("q", texts)])
  assert found == [float(n) for n in range(1, 101)]
  sizes = sorted(len(body["texts"]) for _, _, body in server.seen)
  assert sizes == [4, 32, 32, 32]


@pytest.mark.parametrize(
  ("reply", "sentence"),
  [
    ([{"index": 0, "score": 1.0}], "a finite score for each of 3 texts"),
    ([{"index": i, "score": 1.0} for i in (0, 1, 1)], "for each of 3 texts"),
    ([{"index": i, "score": 1.0} for i in (0, 1, 3)], "for each of 3 texts"),
    ([{"index": i, "score": None} for i in range(3)], "a finite score"),
    ([{"index": True, "score": 1.0}] * 3, "for each of 3 texts"),
    ({"results": {}}, "for each of 3 texts"),
    ({"error": "no model"}, "for each of 3 texts"),
    ("text", "for each of 3 texts"),
  ],
)
def test_a_malformed_answer_fails_its_query(reply, sentence):
  made = reranker(lambda request: httpx2.Response(200, json=reply))
  (error,) = scores(made, ASKED[:1])
  assert isinstance(error, types.RetrievalError) and sentence in str(error)
