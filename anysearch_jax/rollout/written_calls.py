"""Reads calls of tools that a model writes into the text of its message.

A server turns the calls of models that it knows into fields of the message.
Others stay in the text, spelled as the model's family was trained to: bare or
fenced JSON (Qwen2.5-Coder), Hermes, Llama, Mistral, DeepSeek, Kimi, GLM,
Harmony, Gemma, Phi, and XML. The spellings are those of the parsers of vLLM and
SGLang:
https://docs.vllm.ai/en/latest/features/tool_calling.html
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

# Only this much of a text is searched, in characters and opening brackets, so
# that no text takes long.
_LONGEST = 20_000
_MOST_OBJECTS = 64
# Characters between the name of a tool and its arguments, such as "```json".
_LONGEST_GAP = 120
_NAME = r"(?:functions[.:])?([\w-]+)"
# Marks that precede the name of a tool, by family. No answer contains them.
_OPENINGS = re.compile(
  "|".join(
    (
      rf"<function={_NAME}>",  # Llama 3, Qwen3-Coder.
      # MiniMax, DeepSeek 3.2.
      rf"<(?:\S{{0,9}})?invoke name=[\"']{_NAME}[\"']>",
      rf"\[TOOL_CALLS\]\s*{_NAME}",  # Mistral.
      rf"<tool_call>\s*<name>\s*{_NAME}",  # XML.
      rf"<tool_call>\s*{_NAME}\s*(?=\n|<arg_key>|</tool_call>)",  # GLM.
      rf"<[|｜]tool[_▁]call[_▁]begin[|｜]>\s*{_NAME}(?=[:{{<]|$)",  # Kimi.
      rf"<[|｜]tool[_▁]sep[|｜]>\s*{_NAME}(?=\s)",  # DeepSeek 3.
      rf"<\|channel\|>\w+ to={_NAME}",  # Harmony.
    )
  )
)
_MARKS = re.compile(
  r"</?tool_calls?>|\[/?TOOL_CALLS\]|<\|python_tag\|>|<[|｜]/?tool[_▁]call"
  r"|<function=|<function_calls?>|functools\[|```tool_code|\bto=functions\."
)
_FENCE = re.compile(r"```\w*\s*\Z")
# Where a call in Python's form may begin: a text that is nothing else, or after
# a mark of Gemma, Llama 4 or LFM.
_PYTHON = re.compile(
  r"(?:\A|```(?:tool_code|python|py)?\s|<\|python_tag\|>"
  r"|<\|tool_call_start\|>)\s*\[?\s*(?:print\()?\s*(?:default_api\.)?"
  rf"(?={_NAME}\()"
)
# How families write one argument; groups: its name, its value.
_PARAMETERS = (
  re.compile(r"<parameter=([\w-]+)>\s*(.*?)\s*</parameter>", re.S),
  re.compile(
    r"<(?:\S{0,9})?parameter name=[\"']([\w-]+)[\"'][^>]*>\s*(.*?)\s*"
    r"</(?:\S{0,9})?parameter>",
    re.S,
  ),
  re.compile(
    r"<arg_key>\s*([\w-]+)\s*</arg_key>\s*<arg_value>\s*(.*?)\s*</arg_value>",
    re.S,
  ),
  re.compile(r"<([\w-]+)>\s*([^<]*?)\s*</\1>"),
)
# Names of the fields of a call in JSON.
_NAME_FIELDS = ("name", "tool", "tool_name", "function")
_ARGUMENT_FIELDS = ("arguments", "parameters", "args", "input", "tool_input")


class WrittenCall(NamedTuple):
  """A call that is written in a text.

  Attributes:
    name: the tool.
    arguments: its arguments by name.
    start: offset of the call in the text.
  """

  name: str
  arguments: Mapping[str, Any]
  start: int


def find(text: str, tools: Collection[str]) -> WrittenCall | None:
  """Returns the first call of one of the tools in a text; None without one.

  Args:
    text: what a model wrote, without its reasoning.
    tools: names of the tools.
  """
  return next(iter(find_all(text, tools)), None)


def find_all(text: str, tools: Collection[str]) -> list[WrittenCall]:
  """Returns the calls of tools in a text, in order.

  Args:
    text: what a model wrote, without its reasoning.
    tools: names of the tools.
  """
  text = text[:_LONGEST]
  calls = [
    *_after_names(text),
    *_in_json(text),
    *_in_python(text),
    *_in_tags(text, tools),
  ]
  # A call that two spellings read counts once.
  by_start = {call.start: call for call in calls if call.name in tools}
  offered = [by_start[start] for start in sorted(by_start)]
  if not offered:
    return []
  # The marks before the first call are part of it.
  first = offered[0]
  mark = _MARKS.search(text, 0, first.start) or _FENCE.search(
    text, 0, first.start
  )
  if mark:
    offered[0] = first._replace(start=mark.start())
  return offered


def is_call(text: str) -> bool:
  """Returns whether a text is meant as a call, also of an unknown tool.

  It may be malformed. Such a text is no answer.
  """
  text = text[:_LONGEST]
  has_mark = _MARKS.search(text) or _OPENINGS.search(text)
  return bool(has_mark) or any(_in_json(text))


def _after_names(text: str) -> Iterator[WrittenCall]:
  """Yields calls whose arguments follow the tool's name after a mark."""
  openings = list(_OPENINGS.finditer(text))
  starts = [opening.start() for opening in openings]
  for opening, end in zip(openings, [*starts[1:], len(text)]):
    body = text[opening.end() : end]
    arguments = _arguments(body)
    if arguments is not None:
      (name,) = filter(None, opening.groups())
      yield WrittenCall(name, arguments, opening.start())


def _arguments(body: str) -> dict[str, Any] | None:
  """Returns the arguments at the beginning of a text; None without any."""
  brace = body.find("{", 0, _LONGEST_GAP)
  if brace >= 0 and "<" not in body[:brace].replace("<|", ""):
    value = _json_at(body, brace)
    return value if isinstance(value, dict) else None
  for pattern in _PARAMETERS:
    if parameters := dict(pattern.findall(body)):
      return parameters
  value = _json_at(body, brace) if brace >= 0 else None
  return value if isinstance(value, dict) else None


def _in_json(text: str) -> Iterator[WrittenCall]:
  """Yields calls that are JSON objects with a name and arguments."""
  start = text.find("{")
  for _ in range(_MOST_OBJECTS):
    if start < 0:
      return
    value, end = _json_and_end(text, start)
    call = _call_of_object(value, start)
    if call is None:
      end = start + 1  # A call may be inside the object.
    else:
      yield call
    start = text.find("{", end)


def _call_of_object(value: Any, start: int) -> WrittenCall | None:
  """Returns the call that a JSON value describes."""
  if not isinstance(value, dict):
    return None
  if isinstance(value.get("function"), dict):
    value = value["function"]
  names = [value[name] for name in _NAME_FIELDS if name in value]
  arguments = next(
    (value[name] for name in _ARGUMENT_FIELDS if name in value), None
  )
  if isinstance(arguments, str):
    arguments = _json_at(arguments, 0)
  if not names or not isinstance(names[0], str):
    return None
  if not isinstance(arguments, dict):
    return None
  name = names[0].removeprefix("functions.")
  return WrittenCall(name, arguments, start)


def _in_python(text: str) -> Iterator[WrittenCall]:
  """Yields calls in Python's form, `search(query="lease")`."""
  for match in _PYTHON.finditer(text):
    start = match.end()
    # The line of the call, because a query has no line break.
    line = text[start:].partition("\n")[0]
    closing = line.rfind(")")
    while closing > 0:
      calls = _python_calls(line[: closing + 1])
      if calls:
        for name, arguments, offset in calls:
          yield WrittenCall(name, arguments, start + offset)
        break
      closing = line.rfind(")", 0, closing)


def _in_tags(text: str, tools: Collection[str]) -> Iterator[WrittenCall]:
  """Yields calls in the tags of the paper, `<search>lease</search>`."""
  for tool in tools:
    name = re.escape(tool)
    for match in re.finditer(rf"<{name}>([^<]+)</{name}>", text):
      yield WrittenCall(tool, {"query": match[1].strip()}, match.start())


def _python_calls(expression: str) -> list[tuple[str, dict[str, Any], int]]:
  """Returns name, arguments and offset of each call in an expression.

  The expression is one call of literals, or several between commas; otherwise
  the list is empty.
  """
  try:
    parsed = ast.parse(expression, mode="eval").body
    elements = parsed.elts if isinstance(parsed, ast.Tuple) else [parsed]
    return [_python_call(element) for element in elements]
  except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
    return []


def _python_call(call: ast.expr) -> tuple[str, dict[str, Any], int]:
  """Returns name, arguments and offset of a call of literals.

  Raises:
    ValueError, TypeError: it is something else.
  """
  if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
    raise TypeError("It is no call of a function.")
  arguments = {
    keyword.arg: ast.literal_eval(keyword.value)
    for keyword in call.keywords
    if keyword.arg
  }
  if call.args and not arguments:
    arguments = {"query": ast.literal_eval(call.args[0])}
  return call.func.id, arguments, call.col_offset


def _json_at(text: str, start: int) -> Any:
  """Returns the JSON value that begins at an offset; None if none does."""
  value, _ = _json_and_end(text, start)
  return value


def _json_and_end(text: str, start: int) -> tuple[Any, int]:
  """Returns the JSON value at an offset and its end; None without a value."""
  decoder = json.JSONDecoder(strict=False)
  # Small models forget braces at the end of their text, or of its fence.
  body = text.rstrip("` \n")
  for forgotten_braces in ("", "}", "}}"):
    try:
      value, end = decoder.raw_decode(body + forgotten_braces, start)
    except json.JSONDecodeError as error:
      if error.pos < len(body):
        return None, start
    except (ValueError, RecursionError):
      return None, start
    else:
      return value, end
  return None, start
