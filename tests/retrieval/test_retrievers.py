"""The retriever that a configuration names, as episodes use it."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest
import retrieval_cases as cases
import small_run

from anysearch_jax import config as config_lib
from anysearch_jax import types
from anysearch_jax.launch import retrievers
from anysearch_jax.retrieval import recording
from anysearch_jax.retrieval.index import building, opening


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  """Makes a BM25 index over twenty passages."""
  folder = tmp_path_factory.mktemp("index")
  source = cases.write(folder / "c.jsonl")
  building.build(source, folder / "bm25", building.Settings("bm25"))
  return folder / "bm25"


def config(**values):
  made = config_lib.RetrievalConfig(**values)
  return dataclasses.replace(small_run.CONFIG, retrieval=made)


def ask(retriever, *queries, k=3, corpus=""):
  asked = [types.SearchRequest(query, k, corpus) for query in queries]
  return asyncio.run(retriever.search_many(asked))


def test_an_index_answers_episodes(folder):
  made = retrievers.make(config(kind="index", index=str(folder)), None)
  (first,) = ask(made, "number n7", k=1)
  assert [(p.id, p.title) for p in first] == [("7", '"Title 7"')]
  identity = opening.open_index(folder).identity
  assert made.identity()["identity"] == identity
  with pytest.raises(ValueError, match="of corpus 'other'"):
    ask(made, "n7", corpus="other")


def test_a_run_is_repeated_from_its_log_with_no_retriever(folder, tmp_path):
  log = str(tmp_path / "answers.sqlite")
  index = config(kind="index", index=str(folder), log=log)
  recorded = retrievers.make(index, None)
  seen = ask(recorded, "number n7", "water")
  gone = config(kind="index", index="gone", log=log, log_mode="strict")
  strict = retrievers.make(gone, None)
  told = ask(strict, "water", "number n7", "never asked")
  for mine, theirs in zip(told[:2], seen[::-1], strict=True):
    assert [(p.id, p.title, p.text, p.score) for p in mine] == [
      (p.id, p.title, p.text, p.score) for p in theirs
    ]
  # Not a failed episode: this run cannot be had from this log.
  assert isinstance(told[2], recording.MissError)
  assert "never asked" in str(told[2])
  assert strict.identity() == recorded.identity()


KEY = "sk-Proj/9fQ+aZ_71"
MCP, PAGES = config_lib.McpConfig, config_lib.PagesConfig
MODEL = config_lib.TextModelConfig


@pytest.mark.parametrize(
  ("values", "message"),
  [
    ({"kind": "faiss"}, "kind: found 'faiss', expected one of lex"),
    ({"kind": "http"}, "url: found '' with retrieval.kind 'http'"),
    ({"url": "http://a"}, "url: found 'http://a' with retrieval.kin"),
    ({"kind": "index", "index": "gone"}, "found no finished index"),
    ({"kind": "http", "url": "a"}, "url: found 'a', expected an ad"),
    ({"kind": "milvus"}, "milvus: found ''"),
    ({"kind": "milvus", "milvus": "h"}, "milvus needs|expected the address"),
    ({"ranking": "dense"}, "expected it with kind index or milvus only"),
    ({"kind": "postgres"}, "kind: found 'postgres', expected one of lex"),
    ({"kind": "web", "web": "searxng"}, "address of a server for searxng"),
    ({"kind": "web", "web": "serper", "url": "http://a"}, "none for others"),
    ({"kind": "http", "url": "http://a,"}, "url: found 'http://a,', exp"),
    ({"kind": "web", "web": "bing"}, "kind: found 'bing'"),
    ({"log": "gone.sqlite", "log_mode": "strict"}, "log: "),
    ({"log": "x.sqlite", "log_mode": "write"}, "log_mode: found 'write'"),
    ({"log_mode": "strict"}, "log_mode: found 'strict'"),
    ({"pages": PAGES(first=1)}, "pages.first: found 1 with .* 'lexical'"),
    ({"pages": PAGES(agent="a\r\nCookie: b")}, "pages.agent: .* printable"),
    ({"mcp": MCP(tool="a")}, "expected it with kind mcp only"),
    ({"kind": "mcp"}, "mcp.command: found .* expected it or an address"),
    (
      {"kind": "mcp", "url": "http://a", "mcp": MCP(command=("b",))},
      "expected it or an address",
    ),
    (
      {"kind": "mcp", "url": "http://a", "mcp": MCP(arguments="[1]")},
      r"mcp.arguments: found '\[1\]'.* a JSON object",
    ),
    (
      {"kind": "mcp", "mcp": MCP(command=("a",)), "key_variable": "KEY"},
      "expected it in retrieval.mcp.variables",
    ),
    ({"simulated": "gpt"}, "simulated: found 'gpt'"),
    ({"refined": "ftp://a"}, "refined: found 'ftp://a'"),
    ({"simulated": "http://a/v1"}, "model.name: found ''"),
    ({"simulated": "world", "log": "x.sqlite"}, "log: found 'x"),
    ({"model": MODEL(max_tokens=0)}, "model.max_tokens: found 0"),
    # What may be a key is not shown.
    ({"kind": "http", "url": f"http://me:{KEY}@host"}, "url: found one with"),
    ({"kind": "http", "url": f"http://host?key={KEY}"}, "url: found one with"),
    (
      {"kind": "index", "index": "i", "encoder": f"https://me:{KEY}@host/v1"},
      "encoder: found one with",
    ),
    ({"simulated": f"https://me:{KEY}@host/v1"}, "simulated: found one with"),
    ({"kind": "lexical", "key_variable": KEY}, "expected the name of an env"),
    ({"model": MODEL(key_variable=KEY)}, "expected the name of an env"),
    (
      {"kind": "mcp", "mcp": MCP(command=("a",), variables=(KEY,))},
      r"mcp.variables\[0\]: expected the name",
    ),
  ],
)
def test_invalid_retrieval_is_refused(values, message, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  with pytest.raises(ValueError, match=message) as caught:
    retrievers.make(config(**values), object())
  assert KEY not in str(caught.value)
