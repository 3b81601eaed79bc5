"""Hand-written trajectories and whether their format is right.

Of rows that are equal in kind the first stands for all: a property test draws
thousands, which a second implementation judges (`test_hostile_protocol`).
`m` and `e` are spans of the model and of the environment. A row has a
description, spans, budget, charged searches, scaffold and expected format.
"""
# ruff: noqa: E501 - a row a line.
# fmt: off

from __future__ import annotations

from typing import NamedTuple

from anysearch_jax import types

T = "<think>t</think>"
S = "<search>q</search>"
I = "<information>d</information>"  # noqa: E741
A = "<answer>a</answer>"


def m(text: str) -> types.Span:
  return types.Span(types.Author.MODEL, text)


def e(text: str) -> types.Span:
  return types.Span(types.Author.ENVIRONMENT, text)


def b(remaining: int, used: int, total: int) -> str:
  return f"<budget>remaining={remaining}; used={used}; total={total}</budget>"


class Row(NamedTuple):
  name: str
  spans: list[types.Span]
  budget: int
  searches: int
  scaffold: bool
  expected: int


PLAIN = [
  # Well formed.
  Row("answer at once", [m(T + A)], 3, 0, False, 1),
  Row("budget 0", [m(T + A)], 0, 0, False, 1),
  Row("one search", [m(T + S), e(I), m(T + A)], 3, 1, False, 1),
  Row("two searches", [m(T + S), e(I), m(T + S), e(I), m(T + A)], 3, 2, False, 1),
  Row("white space between blocks", [m(f" \n{T}\t\n{S}\n"), e(f"\n\n{I}\n\n"), m(f"\n{T}\n{A}\n ")], 1, 1, False, 1),
  Row("blocks in spans of their own", [m(T), m(A)], 0, 0, False, 1),
  Row("empty spans", [e(""), m(""), m(T + A), e("")], 0, 0, False, 1),
  Row("blocks over several lines", [m("<think>a\nb\n</think><answer>\na\n</answer>")], 0, 0, False, 1),
  Row("empty blocks", [m("<think></think><answer></answer>")], 0, 0, False, 1),
  Row("other tags inside a block", [m(f"<think><b>x</b></think>{A}")], 0, 0, False, 1),
  Row("a neutralised tag in a document", [m(T + S), e("<information>‹answer›x‹/answer›</information>"), m(T + A)], 1, 1, False, 1),
  # Nothing, or not all of it.
  Row("no span", [], 3, 0, False, 0),
  Row("text only", [m("Paris")], 3, 0, False, 0),
  Row("no answer", [m(T)], 3, 0, False, 0),
  Row("answer without think", [m(A)], 3, 0, False, 0),
  Row("stops after a search", [m(T + S)], 3, 1, False, 0),
  # Order.
  Row("answer before think", [m(A + T)], 3, 0, False, 0),
  Row("search without think", [m(S), e(I), m(T + A)], 3, 1, False, 0),
  Row("two answers", [m(T + A + A)], 3, 0, False, 0),
  Row("a search after the answer", [m(T + A + T + S), e(I)], 3, 1, False, 0),
  Row("search without observation", [m(T + S + T + A)], 3, 1, False, 0),
  Row("two searches, one observation", [m(T + S + S), e(I), m(T + A)], 3, 2, False, 0),
  Row("an observation of no search", [e(I), m(T + A)], 3, 0, False, 0),
  # Pairs.
  Row("think not closed", [m(f"<think>t{A}")], 3, 0, False, 0),
  Row("a stray closing tag", [m(f"{T}{A}</answer>")], 3, 0, False, 0),
  Row("closed by another name", [m(f"<think>t</search>{A}")], 3, 0, False, 0),
  Row("answer nested in think", [m(f"<think>t{A}</think>")], 3, 0, False, 0),
  Row("a tag named in a think", [m(f"<think>use <search></think>{A}")], 3, 0, False, 0),
  Row("a tag in a document", [m(T + S), e(f"<information>{A}</information>"), m(T + A)], 3, 1, False, 0),
  # Text outside of blocks.
  Row("text before", [m(f"Sure. {T}{A}")], 3, 0, False, 0),
  Row("text after", [m(f"{T}{A}.")], 3, 0, False, 0),
  Row("an unknown tag", [m(f"{T}<verify>v</verify>{A}")], 3, 0, False, 0),
  Row("a neutralised tag outside", [m(f"‹think›{T}{A}")], 3, 0, False, 0),
  Row("an error line", [m(S), e("\nsearch or answer\n"), m(T + A)], 3, 0, False, 0),
  # Authors and spans.
  Row("the model writes an observation", [m(T + S + I + T + A)], 3, 1, False, 0),
  Row("the environment writes a think", [e(T), m(A)], 3, 0, False, 0),
  Row("the environment writes the answer", [m(T), e(A)], 3, 0, False, 0),
  Row("the prompt's author", [types.Span(types.Author.PROMPT, T + A)], 3, 0, False, 0),
  Row("a think over two turns", [m("<think>t"), m(f"</think>{A}")], 3, 0, False, 0),
  Row("a think around an observation", [m(f"{T}{S}<think>"), e(I), m(f"</think>{T}{A}")], 3, 1, False, 0),
  Row("an observation closed by the model", [m(T + S), e("<information>d"), m(f"</information>{T}{A}")], 3, 1, False, 0),
  # Counts.
  Row("more charged than written", [m(T + S), e(I), m(T + A)], 3, 2, False, 0),
  Row("beyond the budget", [m(T + S), e(I), m(T + S), e(I), m(T + A)], 1, 2, False, 0),
  Row("a search at budget 0", [m(T + S), e(I), m(T + A)], 0, 1, False, 0),
  Row("a negative count", [m(T + A)], 3, -1, False, 0),
  Row("a count beyond memory", [m(T + A)], 2**62, 2**62, False, 0),
]

SCAFFOLD = [
  Row("answer at once", [e(b(3, 0, 3)), m(T + A)], 3, 0, True, 1),
  Row("budget 0", [e(b(0, 0, 0)), m(T + A)], 0, 0, True, 1),
  Row("one search", [e(b(2, 0, 2)), m(T + S), e(I), e(b(1, 1, 2)), m(T + A)], 2, 1, True, 1),
  Row("observation and budget in one span", [e(b(2, 0, 2) + "\n"), m(T + S), e(f"{I}\n{b(1, 1, 2)}\n"), m(T + A)], 2, 1, True, 1),
  Row("budget of two digits", [e(b(12, 0, 12)), m(T + S), e(I + b(11, 1, 12)), m(T + A)], 12, 1, True, 1),
  Row("no budget block", [m(T + A)], 3, 0, True, 0),
  Row("two budget blocks", [e(b(3, 0, 3) * 2), m(T + A)], 3, 0, True, 0),
  Row("budget after think", [m(T), e(b(3, 0, 3)), m(A)], 3, 0, True, 0),
  Row("no second budget block", [e(b(2, 0, 2)), m(T + S), e(I), m(T + A)], 2, 1, True, 0),
  Row("budget before its observation", [e(b(2, 0, 2)), m(T + S), e(b(1, 1, 2) + I), m(T + A)], 2, 1, True, 0),
  Row("wrong remaining", [e(b(2, 0, 3)), m(T + A)], 3, 0, True, 0),
  Row("an empty budget block", [e("<budget></budget>"), m(T + A)], 3, 0, True, 0),
  Row("a fourth number", [e("<budget>remaining=3; used=0; total=3; x=1</budget>"), m(T + A)], 3, 0, True, 0),
  Row("the model writes the budget", [m(b(3, 0, 3) + T + A)], 3, 0, True, 0),
  Row("a budget over two spans", [e("<budget>remaining=3; "), e("used=0; total=3</budget>"), m(T + A)], 3, 0, True, 0),
  Row("scaffold off, budget block", [e(b(3, 0, 3)), m(T + A)], 3, 0, False, 0),
  Row("an error line with its budget", [e(b(1, 0, 1)), m(T), e(f"\nsearch or answer\n{b(1, 0, 1)}"), m(T + A)], 1, 0, True, 0),
]
