"""Arguments and results of MCP tools, by hand."""

from __future__ import annotations

import json

import pytest

mcp_types = pytest.importorskip(
  "mcp_types", reason="needs requirements-serve.txt"
)
from retrieval.mcp_tools import arguments, results  # noqa: E402

TEXT = {"type": "string"}
NUMBER = {"type": "integer"}
MAYBE = {"anyOf": [{"type": "integer"}, {"type": "null"}]}


def schema(required=(), **properties):
  return {
    "type": "object",
    "properties": properties,
    "required": list(required),
  }


@pytest.mark.parametrize(
  ("found", "query", "count"),
  [
    (schema(query=TEXT, k=MAYBE), "query", "k"),  # Ours.
    (schema(query=TEXT, num_results=NUMBER), "query", "num_results"),  # Exa.
    (
      schema(query=TEXT, max_results={"type": "number"}),
      "query",
      "max_results",
    ),
    (schema(q=TEXT, numResults=NUMBER), "q", "numResults"),
    (schema(searchQuery=TEXT, topK=NUMBER), "searchQuery", "topK"),
    (schema(words=TEXT), "words", ""),
    (schema(["words"], words=TEXT, site=TEXT), "words", ""),
    (schema(query=TEXT, limit=TEXT), "query", ""),
    (schema(k=NUMBER, text={"type": ["string", "null"]}), "text", "k"),
    (schema(limit=NUMBER, top_k=NUMBER, query=TEXT), "query", "top_k"),
  ],
)
def test_arguments_are_detected_by_name_and_type(found, query, count):
  made = arguments.detect(found)
  assert (made.query, made.count) == (query, count)
  expected = {query: "a b"} | ({count: 4} if count else {})
  assert made.of("a b", 4) == expected


@pytest.mark.parametrize(
  ("found", "sentence"),
  [
    (schema(a=TEXT, b=TEXT), "no argument that is clearly a query.*: a, b"),
    (schema(["a", "b"], a=TEXT, b=TEXT), "clearly a query"),
    (schema(k=NUMBER), "clearly a query"),
    ({}, "arguments: none"),
    ({"properties": 3, "required": "x"}, "arguments: none"),
    (schema(["query", "index"], query=TEXT, index=TEXT), "requires index"),
  ],
)
def test_arguments_that_cannot_be_told_are_listed(found, sentence):
  with pytest.raises(ValueError, match=sentence):
    arguments.detect(found)


def test_named_and_fixed_arguments_come_first():
  found = schema(["index"], a=TEXT, b=TEXT, n=NUMBER, m=NUMBER, index=TEXT)
  made = arguments.detect(found, query="b", count="m", fixed={"index": "x"})
  assert made.of("q", 2) == {"index": "x", "b": "q", "m": 2}
  for names in ({"query": "a"}, {"count": "n"}):
    with pytest.raises(ValueError, match=r"arguments: found '.', which is "):
      arguments.detect(found, **names, fixed={"index": "x", "a": "", "n": 1})


def test_a_tools_largest_number_is_kept():
  limited = schema(query=TEXT, k={"type": "integer", "maximum": 5})
  assert arguments.detect(limited).of("q", 9)["k"] == 5
  listed = schema(queries={"type": "array"}, k=NUMBER)
  assert arguments.detect(listed).of("q", 9) == {"queries": ["q"], "k": 9}


def test_the_tool_is_named_alone_or_search():
  assert arguments.choose("", ["find"]) == "find"
  assert arguments.choose("", ["answer", "search"]) == "search"
  assert arguments.choose("answer", ["answer", "search"]) == "answer"
  with pytest.raises(ValueError, match="server's tools are: a, b"):
    arguments.choose("c", ["b", "a"])
  with pytest.raises(ValueError, match="tools: none"):
    arguments.choose("", [])


A = {"id": "1", "title": "Emma", "text": "A novel."}
AS_PASSAGE = ("1", "Emma", "A novel.", 0.0)


@pytest.mark.parametrize(
  ("value", "expected"),
  [
    ({"passages": [A]}, [AS_PASSAGE]),  # Ours.
    ({"result": [A]}, [AS_PASSAGE]),  # The SDK wraps lists so.
    ([A], [AS_PASSAGE]),
    ([[A]], [AS_PASSAGE]),
    ({"data": {"results": [A]}}, [AS_PASSAGE]),
    ({"result": json.dumps([A])}, [AS_PASSAGE]),
    (
      {"result": [{"document": {"id": 7, "contents": "Emma\nA."}, "score": 2}]},
      [("7", "Emma", "A.", 2.0)],
    ),
    (
      {"results": [{"url": "http://a", "title": "T", "content": "C"}]},
      [("http://a", "T", "C", 0.0)],
    ),
    (
      [{"page_content": "C", "metadata": {"source": "f.txt", "title": "T"}}],
      [("f.txt", "T", "C", 0.0)],
    ),
    ({"hits": []}, []),
    ({"results": [A, {"x": 1}, None, 3]}, [AS_PASSAGE]),
    ([{"id": "1", "text": "a\0\ud800b", "score": 1e999}], [("1", "", "ab", 0)]),
    ([{"id": "1", "text": "a", "score": 10**400}], [("1", "", "a", 0.0)]),
    (
      [{"id": "1", "title": "only a title"}],
      [("1",) + ("only a title",) * 2 + (0,)],
    ),
  ],
)
def test_values_become_passages_also_as_a_text_of_json(value, expected):
  block = mcp_types.TextContent(type="text", text=json.dumps(value))
  for result in (
    mcp_types.CallToolResult(content=[], structured_content=value),
    mcp_types.CallToolResult(content=[block]),
  ):
    found = results.passages(result)
    assert [(p.id, p.title, p.text, p.score) for p in found] == expected


def blocks(*content):
  return mcp_types.CallToolResult(content=list(content))


def test_each_text_is_a_passage_whose_id_is_stable():
  text = mcp_types.TextContent(type="text", text="{not JSON")
  again, other = text, mcp_types.TextContent(type="text", text="b")
  found = results.passages(blocks(text, again, other))
  assert [p.text for p in found] == ["{not JSON"] * 2 + ["b"]
  assert found[0].id == found[1].id != found[2].id
  assert found[0].id.startswith("sha256:")


def test_resources_and_links_are_passages_and_images_none():
  resource = mcp_types.EmbeddedResource(
    type="resource",
    resource=mcp_types.TextResourceContents(uri="file:///a", text="A."),
  )
  link = mcp_types.ResourceLink(
    type="resource_link", uri="http://b/", name="B", description="About B."
  )
  image = mcp_types.ImageContent(type="image", data="AA", mime_type="image/png")
  found = results.passages(blocks(resource, image, link))
  assert [(p.id, p.title, p.text) for p in found] == [
    ("file:///a", "", "A."),
    ("http://b/", "B", "About B."),
  ]
  assert results.passages(blocks(image)) is None
  assert results.passages(blocks()) == ()
  empty = mcp_types.TextContent(type="text", text=" ")
  assert results.passages(blocks(empty)) == ()


def test_structured_content_without_results_leaves_the_texts():
  text = mcp_types.TextContent(type="text", text="found")
  result = mcp_types.CallToolResult(
    content=[text], structured_content={"took": {"ms": 3}}
  )
  assert [p.text for p in results.passages(result)] == ["found"]
