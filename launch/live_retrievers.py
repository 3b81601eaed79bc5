"""Retrievers that ask the live web, or the tools of other programs."""

from __future__ import annotations

import json
from typing import Any

from anysearch_jax import config as config_lib
from anysearch_jax import types


def page_reader(c: config_lib.PagesConfig, words: int) -> Any:
  """Returns a `pages.PageReader`.

  Raises:
    ValueError: a package is missing, or a value is invalid.
  """
  try:
    from retrieval.web_pages import fetching, pages
  except ModuleNotFoundError as error:
    raise ValueError(
      f"Pages of the web need a package that is missing ({error}); run pip "
      "install -r requirements-web.txt."
    ) from None
  limits = fetching.Limits(
    deadline=c.deadline,
    largest=c.largest,
    agent=c.agent,
    allowed=c.allow_private,
  )
  try:
    return pages.PageReader(limits, words=words)
  except ValueError as error:
    raise ValueError(f"retrieval.pages.allow_private: {error}") from None


def with_pages(
  c: config_lib.RetrievalConfig, found: Any
) -> tuple[types.BatchRetriever, Any]:
  """Returns a web search whose first results show their pages."""
  reader = page_reader(c.pages, c.pages.words)
  from retrieval.web_pages import pages

  made = pages.SearchWithPages(found, reader, first=c.pages.first)
  return made, made.identity()


def mcp_tool(
  c: config_lib.RetrievalConfig,
) -> tuple[types.BatchRetriever, Any]:
  """Returns a retriever that calls a tool of an MCP server, and its identity.

  Raises:
    ValueError: a package or a variable is missing, the server cannot be
      reached, or its tool does not fit.
  """
  try:
    from retrieval.mcp_tools import tool, transports
  except ModuleNotFoundError as error:
    raise ValueError(
      f"MCP tools need a package that is missing ({error}); run pip install -r "
      "requirements-serve.txt."
    ) from None
  from anysearch_jax.host.http import calls

  secrets, headers = [], {}
  if c.key_variable:
    secrets = [calls.secret_in(c.key_variable, "the token of the MCP server")]
    headers["Authorization"] = f"Bearer {secrets[0]}"
  server: transports.Process | transports.Address
  if c.url:
    server = transports.Address(c.url, headers, tool.LARGEST)
  else:
    given = {
      name: calls.secret_in(name, "a value for the MCP server")
      for name in c.mcp.variables
    }
    secrets = list(given.values())
    server = transports.Process(c.mcp.command, given, tool.LARGEST)
  try:
    found = tool.McpRetriever(
      server,
      tool=c.mcp.tool,
      query=c.mcp.query,
      count=c.mcp.k,
      fixed=json.loads(c.mcp.arguments or "{}"),
      price=c.price,
      patience=calls.Patience(deadline=c.mcp.deadline),
      secrets=secrets,
    )
  except types.RetrievalError as error:
    raise ValueError(f"retrieval.mcp: {error}") from error
  return found, found.identity()
