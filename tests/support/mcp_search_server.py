"""A search server of the official MCP SDK; hostile on request.

    python mcp_search_server.py [--http PORT [SEARCHES_A_SECOND]]

Query `hang` never answers, `die` ends the process, `huge` answers 50 MB,
`error` fails with terminal escapes, `image` answers
without text, and `plain` as plain text.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import pydantic
from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp_types import ImageContent, TextContent

DOCUMENTS = {
  "w/1": ("Emma", "A novel by Jane Austen, of 1815."),
  "w/2": ("Jane Austen", "An author. She wrote Emma."),
  "w/3": ("Lima", "The capital of Peru. Emma was never there."),
}


class Hit(pydantic.BaseModel):
  id: str
  title: str
  text: str
  score: float


class Found(pydantic.BaseModel):
  results: list[Hit]


def ranked(query: str, limit: int) -> list[Hit]:
  words = query.lower().split()
  hits = [
    Hit(
      id=name,
      title=title,
      text=text,
      score=sum(f"{title} {text}".lower().count(word) for word in words),
    )
    for name, (title, text) in DOCUMENTS.items()
  ]
  hits = [hit for hit in hits if hit.score]
  return sorted(hits, key=lambda hit: -hit.score)[:limit]


def make() -> MCPServer:
  server = MCPServer("library", version="1.0", log_level="ERROR")

  @server.tool()
  async def search_documents(search_query: str, max_results: int = 10) -> Found:
    """Searches the documents."""
    if search_query == "hang":
      import asyncio

      await asyncio.sleep(3600)
    if search_query == "die":
      print("The disk is gone.", file=sys.stderr, flush=True)
      os._exit(3)
    if search_query == "huge":
      hit = Hit(id="x", title="", text="a" * 50_000_000, score=1)
      return Found(results=[hit])
    if search_query == "error":
      raise ToolError("\x1b]0;owned\x07The index\nis being built.")
    return Found(results=ranked(search_query, max_results))

  @server.tool(structured_output=False)
  def lines(q: str) -> Any:
    """Answers in text blocks."""
    if q == "image":
      return [ImageContent(type="image", data="AAAA", mime_type="image/png")]
    return [
      TextContent(type="text", text=f"{hit.title}: {hit.text}")
      for hit in ranked(q, 10)
    ]

  @server.tool(structured_output=False)
  def text_of_json(q: str) -> str:
    """Answers in one text that is JSON, with names of its own."""
    hits = [
      {"link": hit.id, "name": hit.title, "body": {"words": hit.text}}
      for hit in ranked(q, 10)
    ]
    return json.dumps({"data": {"hits": hits}})

  @server.tool()
  def both(query: str, index: str) -> list[str]:
    """Needs an index."""
    return [f"{index}: {hit.text}" for hit in ranked(query, 10)]

  @server.tool()
  def clock() -> float:
    """Takes no query."""
    return time.time()

  return server


class Limited:
  """An application that answers `limit` calls of tools in a second."""

  def __init__(self, app: Any, limit: int):
    self.app, self.limit, self.times = app, limit, []

  async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
    heard = []
    if scope["type"] == "http" and scope["method"] == "POST":
      heard.append(await receive())
      if b"tools/call" in heard[0]["body"]:
        now = time.monotonic()
        self.times = [at for at in self.times if at > now - 1]
        if len(self.times) >= self.limit:
          head = [(b"retry-after", b"1")]
          await send(
            {"type": "http.response.start", "status": 429, "headers": head}
          )
          await send({"type": "http.response.body", "body": b"Slower."})
          return
        self.times.append(now)

    async def replayed() -> Any:
      return heard.pop() if heard else await receive()

    await self.app(scope, replayed, send)


if __name__ == "__main__":
  if sys.argv[1:2] == ["--http"] and sys.argv[3:]:
    import uvicorn

    limited = Limited(make().streamable_http_app(), int(sys.argv[3]))
    uvicorn.run(limited, port=int(sys.argv[2]), log_level="error")
  elif sys.argv[1:2] == ["--http"]:
    make().run("streamable-http", host="127.0.0.1", port=int(sys.argv[2]))
  else:
    make().run()
