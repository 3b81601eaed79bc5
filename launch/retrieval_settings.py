"""Checks that the values of a retrieval configuration fit together."""

from __future__ import annotations

import json
import operator
import re

from anysearch_jax import config as config_lib
from anysearch_jax.config import settings
from anysearch_jax.host import plugins

# The settings of each kind: one that it needs, and those that it may have. No
# other kind may have them; those that are in no row are of all kinds.
KINDS = {
  "lexical": ("", ""),
  "index": ("index", "encoder"),
  "http": ("url", "key_variable concurrency rate wait"),
  "web": ("web", "url price key_variable pages.first concurrency rate wait"),
  "milvus": ("milvus", "collection encoder ranking filter key_variable"),
  "mcp": ("", "mcp url price key_variable concurrency rate wait"),
}
_OF = {
  kind: {name for name in (needed, *others.split()) if name}
  for kind, (needed, others) in KINDS.items()
}
_DEFAULTS = config_lib.RetrievalConfig()


def validate(c: config_lib.RetrievalConfig) -> None:
  """Checks that the values of a retrieval configuration fit together.

  Raises:
    ValueError: a value is invalid or contradicts another.
  """
  settings.check(c, "retrieval")
  if c.kind not in KINDS and not plugins.is_name(c.kind):
    raise ValueError(
      f"retrieval.kind: found {c.kind!r}, expected one of {', '.join(KINDS)}, "
      "or path/to/file.py:NAME."
    )
  _validate_secrets(c)
  for field in sorted(set().union(*_OF.values())):
    kinds = [kind for kind in KINDS if field in _OF[kind]]
    is_given = _value(c, field) != _value(_DEFAULTS, field)
    if is_given and c.kind not in kinds:
      raise _wrong(c, field, f"it with kind {' or '.join(kinds)} only")
    if not is_given and field == KINDS.get(c.kind, ("", ""))[0]:
      raise _wrong(c, field, "one")
  if c.log_mode != "record" and not c.log:
    raise _wrong(c, "log_mode", "retrieval.log, the file to answer from")
  if not (c.pages.agent.strip() and re.fullmatch(r"[ -~]+", c.pages.agent)):
    raise _wrong(c, "pages.agent", "printable ASCII, for a header")
  if c.kind == "mcp" and bool(c.mcp.command) == bool(c.url):
    raise _wrong(c, "mcp.command", "it or an address in retrieval.url")
  if c.mcp.command and c.key_variable:
    raise _wrong(c, "key_variable", "it in retrieval.mcp.variables")
  if not _is_object(c.mcp.arguments or "{}"):
    raise _wrong(c, "mcp.arguments", 'a JSON object such as {"language": "en"}')
  for field, value in (("simulated", c.simulated), ("refined", c.refined)):
    if value not in ("", "world", "policy") and not _is_url(value):
      raise _wrong(
        c,
        field,
        "'world', 'policy', the address of a model (http://127.0.0.1:8000/v1), "
        "or nothing",
      )
    if _is_url(value) and not c.model.name:
      raise _wrong(c, "model.name", f"the name of the model of {field}")
  # The passages of a simulation are those of one search of one episode.
  if c.log and c.simulated:
    raise _wrong(c, "log", "none with retrieval.simulated")


def _wrong(
  c: config_lib.RetrievalConfig, field: str, expected: str
) -> ValueError:
  return ValueError(
    f"retrieval.{field}: found {_value(c, field)!r} with retrieval.kind "
    f"{c.kind!r}; expected {expected}."
  )


def _validate_secrets(c: config_lib.RetrievalConfig) -> None:
  """Checks that a configuration, which a run stores, has no keys in it."""
  # Several addresses are shards and their replicas.
  urls = [("url", url.strip()) for url in re.split(r"[,|]", c.url) if c.url]
  models = [("simulated", c.simulated), ("refined", c.refined)]
  urls += [model for model in models if _is_url(model[1])]
  variables = [
    ("key_variable", c.key_variable),
    ("model.key_variable", c.model.key_variable),
    *((f"mcp.variables[{i}]", x) for i, x in enumerate(c.mcp.variables)),
  ]
  if not urls and not any(variable for _, variable in variables):
    return
  # Imported late: a run without a service needs no HTTP.
  from anysearch_jax.host import redaction

  for field, url in urls:
    if not redaction.is_address(url):
      raise ValueError(
        f"retrieval.{field}: found {redaction.shown(url)}, expected an address "
        "such as http://127.0.0.1:8000."
      )
  for field, variable in variables:
    if variable:
      redaction.check_variable(variable, f"retrieval.{field}")


def _value(c: config_lib.RetrievalConfig, field: str) -> object:
  return operator.attrgetter(field)(c)


def _is_url(text: str) -> bool:
  return text.startswith(("http://", "https://"))


def _is_object(text: str) -> bool:
  try:
    return isinstance(json.loads(text), dict)
  except ValueError:
    return False
