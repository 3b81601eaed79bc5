"""Checks that the values of a retrieval configuration fit together."""

from __future__ import annotations

import json
import re

from anysearch_jax import config as config_lib
from anysearch_jax.host import plugins

KINDS = (
  "lexical",
  "index",
  "http",
  "web",
  "milvus",
  "postgres",
  "mcp",
)
_FIELDS = {
  "index": "index",
  "http": "url",
  "web": "web",
  "milvus": "milvus",
  "postgres": "postgres",
}
# Kinds besides `http` whose server may be at `url`, with the search engine.
_OTHER_URLS = (("web", "searxng"), ("mcp", ""))
# Optional fields, and the kinds that accept them.
_EXTRAS = {
  "encoder": ("index", "milvus", "postgres"),
  "collection": ("milvus",),
  "table": ("postgres",),
  "ranking": ("milvus", "postgres"),
  "ef_search": ("postgres",),
  "filter": ("milvus", "postgres"),
  "engine": ("web",),
  "price": ("web", "mcp"),
  "key_variable": ("http", "web", "milvus", "postgres", "mcp"),
}
_PASSWORD = re.compile(r"password\s*=|://[^@?]*:[^@?]*@", re.IGNORECASE)
_LOG_MODES = ("record", "replay", "strict")
# Values of `simulated` and `refined` that are not the address of a model.
_WITHOUT_ADDRESS = ("", "world", "policy")


def validate(c: config_lib.RetrievalConfig) -> None:
  """Checks that the values of a retrieval configuration fit together.

  Raises:
    ValueError: a value is invalid or contradicts another.
  """
  if c.kind not in KINDS and not plugins.is_name(c.kind):
    raise ValueError(
      f"retrieval.kind: found {c.kind!r}, expected one of {', '.join(KINDS)}, "
      "or path/to/file.py:NAME."
    )
  _validate_secrets(c)
  for kind, field in _FIELDS.items():
    if field == "url" and c.url and (c.kind, c.web) in _OTHER_URLS:
      continue
    if bool(getattr(c, field)) != (c.kind == kind):
      raise ValueError(
        f"retrieval.{field}: found {getattr(c, field)!r} with retrieval.kind "
        f"{c.kind!r}; expected a value for kind {kind!r} and none for others."
      )
  for field, kinds in _EXTRAS.items():
    if getattr(c, field) and c.kind not in kinds:
      raise ValueError(
        f"retrieval.{field}: found {getattr(c, field)!r} with retrieval.kind "
        f"{c.kind!r}; expected it with kind {' or '.join(kinds)} only."
      )
  if c.log_mode not in _LOG_MODES:
    raise ValueError(
      f"retrieval.log_mode: found {c.log_mode!r}, expected one of "
      f"{', '.join(_LOG_MODES)}."
    )
  if not c.log and c.log_mode != "record":
    raise ValueError(
      f"retrieval.log_mode: found {c.log_mode!r} without retrieval.log; "
      "expected the file to answer from."
    )
  if c.pages.first and c.kind != "web":
    raise ValueError(
      f"retrieval.pages.first: found {c.pages.first} with retrieval.kind "
      f"{c.kind!r}; expected it with kind 'web' only, whose results have "
      "addresses."
    )
  if not (c.pages.agent.strip() and re.fullmatch(r"[ -~]+", c.pages.agent)):
    raise ValueError(
      f"retrieval.pages.agent: found {c.pages.agent!r}, expected a name of "
      "printable ASCII characters, for the header User-Agent."
    )
  _validate_mcp(c)
  _validate_models(c)


def _validate_secrets(c: config_lib.RetrievalConfig) -> None:
  """Checks that a configuration, which is stored with a run, has no keys in it.

  Raises:
    ValueError: a URL or a variable name is invalid; no key is shown.
  """
  named = {"simulated": c.simulated, "refined": c.refined}
  urls = {k: [url] for k, url in named.items() if url.startswith("http")}
  if c.url:
    # Several are shards and their replicas.
    urls["url"] = [each.strip() for each in re.split(r"[,|]", c.url)]
  variables = {
    "key_variable": c.key_variable,
    "model.key_variable": c.model.key_variable,
  }
  variables = {k: name for k, name in variables.items() if name}
  variables |= {
    f"mcp.variables[{i}]": name for i, name in enumerate(c.mcp.variables)
  }
  if _PASSWORD.search(c.postgres):
    raise ValueError(
      "retrieval.postgres: found an address with a password, which is not "
      "shown; expected one without. Put the password into an environment "
      "variable, and name it by retrieval.key_variable."
    )
  if not urls and not variables:
    return
  # Imported late: a run without a service needs no HTTP.
  from anysearch_jax.host import redaction

  for field, url in [(name, url) for name in urls for url in urls[name]]:
    if not redaction.is_address(url):
      raise ValueError(
        f"retrieval.{field}: found {redaction.shown(url)}, expected an address "
        "such as http://127.0.0.1:8000."
      )
  for field, variable in variables.items():
    redaction.check_variable(variable, f"retrieval.{field}")


def _validate_mcp(c: config_lib.RetrievalConfig) -> None:
  """Checks the fields of an MCP tool, as `validate`."""
  if c.kind != "mcp" and c.mcp != config_lib.McpConfig():
    raise ValueError(
      f"retrieval.mcp: found {c.mcp} with retrieval.kind {c.kind!r}; expected "
      "it with kind 'mcp' only."
    )
  if c.kind == "mcp" and bool(c.mcp.command) == bool(c.url):
    raise ValueError(
      f"retrieval.mcp.command: found {c.mcp.command} with retrieval.url "
      f"{c.url!r}; expected one of them, a command or an address."
    )
  if c.mcp.command and c.key_variable:
    raise ValueError(
      f"retrieval.key_variable: found {c.key_variable!r} with a command; "
      "expected it in retrieval.mcp.variables."
    )
  try:
    arguments = json.loads(c.mcp.arguments or "{}")
  except ValueError:
    arguments = None
  if not isinstance(arguments, dict):
    raise ValueError(
      f"retrieval.mcp.arguments: found {c.mcp.arguments!r}, expected a JSON "
      'object such as {"language": "en"}.'
    )


def _validate_models(c: config_lib.RetrievalConfig) -> None:
  """Checks the fields of simulated and refined passages, as `validate`."""
  addresses = 0
  for field in ("simulated", "refined"):
    found = getattr(c, field)
    if found in _WITHOUT_ADDRESS:
      continue
    addresses += 1
    if not found.startswith(("http://", "https://")):
      raise ValueError(
        f"retrieval.{field}: found {found!r}, expected 'world', 'policy', the "
        "address of a model (http://127.0.0.1:8000/v1), or nothing."
      )
  if addresses and not c.model.name:
    raise ValueError(
      "retrieval.model.name: found nothing with retrieval.simulated "
      f"{c.simulated!r} and retrieval.refined {c.refined!r}; expected the name "
      "of the model at the address."
    )
  if c.simulated and c.log:
    raise ValueError(
      f"retrieval.log: found {c.log!r} with retrieval.simulated "
      f"{c.simulated!r}; expected no log, for simulated passages are those of "
      "one search of one episode."
    )
  for name, holds, expected in (
    ("concurrency", c.model.concurrency >= 1, "at least 1"),
    ("temperature", c.model.temperature >= 0, "at least 0"),
    ("top_p", 0 < c.model.top_p <= 1, "above 0, at most 1"),
    ("max_tokens", c.model.max_tokens >= 1, "at least 1"),
    ("deadline", c.model.deadline > 0, "seconds above 0"),
  ):
    if not holds:
      raise ValueError(
        f"retrieval.model.{name}: found {getattr(c.model, name)}, expected "
        f"{expected}."
      )
