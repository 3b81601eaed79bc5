"""The generated world's two searches, of which one is cheap and one is dear.

Both are written `<search> ... </search>`. A query that begins with the word
`tight` asks the cheap one; the word is not part of its query. Results of the
cheap one begin with the same word, so that the policy sees which tool answered.
"""

from __future__ import annotations

import dataclasses
import functools

from anysearch_jax.environment import protocol, spec, tools

# A word of the world's small vocabulary, so that old policies can read it.
MARK = "tight"
CHEAP = tools.Tool(
  "cheap",
  "<search>",
  "</search>",
  observation=functools.partial(
    protocol.observation, begins=f"<information>{MARK} "
  ),
  results=1,
)


def both(env: spec.Environment) -> spec.Environment:
  """Returns an environment in which the first word of a query names a tool."""
  return _with(env, (tools.SEARCH, CHEAP), None)


def cheap_alone(env: spec.Environment) -> spec.Environment:
  """Returns an environment in which every query asks the cheap search."""
  return _with(env, (tools.SEARCH, CHEAP), CHEAP.name)


def dear_alone(env: spec.Environment) -> spec.Environment:
  """Returns an environment in which every query asks the dear search."""
  return _with(env, (tools.SEARCH,), protocol.SEARCH)


def _with(
  env: spec.Environment, held: tuple[tools.Tool, ...], only: str | None
) -> spec.Environment:
  action = functools.partial(_action, only=only)
  return dataclasses.replace(env, tools=held, action=action)


def _action(text: str, only: str | None) -> protocol.Action | None:
  """Returns the action of a turn; `only` is the tool that every query asks."""
  found = protocol.last_action(text)
  if found is None or found.kind is not protocol.ActionKind.SEARCH:
    return found
  first, _, rest = found.content.partition(" ")
  marked = first == MARK
  return protocol.Action(
    protocol.ActionKind.SEARCH,
    rest.strip() if marked else found.content,
    only or (CHEAP.name if marked else protocol.SEARCH),
  )
