"""Tests the scores of a trajectory: answer, exact match, format."""

from __future__ import annotations

import format_table
import growth
import pytest
from format_table import A, I, S, T, e, m
from hypothesis import given, settings
from hypothesis import strategies as st

from anysearch_jax import types
from anysearch_jax.environment import protocol, scoring


@pytest.mark.parametrize(
  "row",
  [
    pytest.param(row, id=f"{part}: {row.name}")
    for part, rows in (
      ("plain", format_table.PLAIN),
      ("scaffold", format_table.SCAFFOLD),
    )
    for row in rows
  ],
)
def test_format_table(row):
  found = scoring.check_format(
    row.spans, budget=row.budget, searches=row.searches, scaffold=row.scaffold
  )
  assert found == row.expected


@pytest.mark.parametrize(
  ("text", "expected"),
  [
    ("", ""),
    ("Beijing", "beijing"),
    ("  The   Beatles \n", "beatles"),
    ("An apple a day", "apple day"),
    ("U.S.A.", "usa"),
    ("don't", "dont"),
    ("rock-and-roll", "rockandroll"),
    ("the", ""),
    ("a an the", ""),
    ("?!", ""),
    ("theatre", "theatre"),
    ("a.", ""),
    ("the-end", "theend"),
    ("\u00c9cole", "\u00e9cole"),
    ("\u201cquoted\u201d", "\u201cquoted\u201d"),
    ("1,000", "1000"),
    ("tab\tand\u00a0space", "tab and space"),
  ],
)
def test_normalize_answer(text, expected):
  assert scoring.normalize_answer(text) == expected


@pytest.mark.parametrize(
  ("answer", "aliases", "expected"),
  [
    ("The Beatles", ["beatles"], 1),
    ("beatles", ["The Beatles!", "Fab Four"], 1),
    ("fab four", ["The Beatles!", "Fab Four"], 1),
    ("beatle", ["beatles"], 0),
    ("the beatles band", ["beatles"], 0),
    ("", ["beatles"], 0),
    ("", [""], 0),
    ("the", ["a", "?"], 0),
    ("?", ["?"], 0),
    ("x", [], 0),
    (None, ["beatles"], 0),
    (None, [""], 0),
  ],
)
def test_exact_match(answer, aliases, expected):
  assert scoring.exact_match(answer, aliases) == expected


@pytest.mark.parametrize(
  ("spans", "expected"),
  [
    ([], None),
    ([m(T)], None),
    ([m(T + A)], "a"),
    ([m("<answer> Beijing\n</answer>")], "Beijing"),
    ([m("<answer></answer>")], ""),
    ([m("<answer> </answer>")], ""),
    ([m("<answer>a</answer><answer>b</answer>")], "b"),
    ([m("<answer>a</answer>"), m("<answer>b</answer>")], "b"),
    ([m("<answer>a</answer>"), m("no")], "a"),
    ([m("<answer>a</answer>"), m("<answer></answer>")], ""),
    ([m("<answer>a</answer><answer>b")], "a"),
    ([m("<answer>a<answer>b</answer>")], "b"),
    ([m("<think><answer>a</answer></think>")], "a"),
    ([m("<answer>a"), m("</answer>")], None),
    ([m("<answer>a"), e("b</answer>")], None),
    ([e("<answer>a</answer>")], None),
    ([m("<answer>a</answer>"), e("<answer>b</answer>")], "a"),
    ([m("<Answer>a</Answer>")], None),
  ],
)
def test_extract_answer(spans, expected):
  assert scoring.extract_answer(spans) == expected


def test_judge_returns_answer_exact_match_and_format():
  spans = [m(T + S), e(I), m(f"{T}<answer> The A.</answer>")]
  verdict = scoring.judge(
    spans, golden_answers=["x"], budget=2, searches=1, scaffold=False
  )
  assert verdict == scoring.Verdict(answer="The A.", em=0, format=1)
  verdict = scoring.judge(
    [m("<answer>X</answer>")],
    golden_answers=["", "x"],
    budget=2,
    searches=1,
    scaffold=False,
  )
  assert verdict == scoring.Verdict(answer="X", em=1, format=0)


# A well-formed trajectory is a list of blocks (author, name, content) with
# white space between them.
SPACE = st.text(" \n\t", max_size=2)
CONTENT = st.text(max_size=8).map(protocol.neutralise)


@st.composite
def well_formed(draw):
  scaffold = draw(st.booleans())
  searches = draw(st.integers(0, 3))
  budget = searches + draw(st.integers(0, 2))
  blocks = []
  for used in range(searches + 1):
    if scaffold:
      state = protocol.budget_state(budget, used)
      blocks.append((types.Author.ENVIRONMENT, "budget", state))
    blocks.append((types.Author.MODEL, "think", draw(CONTENT)))
    if used < searches:
      blocks.append((types.Author.MODEL, "search", draw(CONTENT)))
      blocks.append((types.Author.ENVIRONMENT, "information", draw(CONTENT)))
  blocks.append((types.Author.MODEL, "answer", draw(CONTENT)))
  return blocks, dict(budget=budget, searches=searches, scaffold=scaffold)


def write(blocks) -> list[types.Span]:
  """Returns one span per block."""
  return [
    types.Span(author, f"<{name}>{content}</{name}>")
    for author, name, content in blocks
  ]


def join(spans, joins, space) -> list[types.Span]:
  """Joins neighbouring spans of one author where `joins` is True."""
  joined = spans[:1]
  for span, together in zip(spans[1:], joins):
    if together and joined[-1].author == span.author:
      text = joined.pop().text + space + span.text
      span = types.Span(span.author, text)
    joined.append(span)
  return joined


@given(well_formed(), st.lists(st.booleans(), min_size=20, max_size=20), SPACE)
def test_a_well_formed_response_scores_1_however_spans_are_cut(
  drawn, joins, space
):
  blocks, state = drawn
  spans = join(write(blocks), joins, space)
  assert scoring.check_format(spans, **state) == 1


def _drop_block(blocks, i, state):
  del blocks[i]
  return write(blocks)


def _repeat_block(blocks, i, state):
  blocks.insert(i, blocks[i])
  return write(blocks)


def _drop_tag(blocks, i, state):
  spans = write(blocks)
  author, name, content = blocks[i]
  spans[i] = types.Span(author, f"<{name}>{content}")
  return spans


def _upper_case(blocks, i, state):
  author, name, content = blocks[i]
  blocks[i] = (author, name.upper(), content)
  return write(blocks)


def _rename(blocks, i, state):
  author, name, content = blocks[i]
  names = protocol.TAGS
  blocks[i] = (author, names[names.index(name) - 1], content)
  return write(blocks)


def _swap_author(blocks, i, state):
  author, name, content = blocks[i]
  other = {
    types.Author.MODEL: types.Author.ENVIRONMENT,
    types.Author.ENVIRONMENT: types.Author.MODEL,
  }
  blocks[i] = (other[author], name, content)
  return write(blocks)


def _swap_blocks(blocks, i, state):
  j = (i + 1) % len(blocks)
  blocks[i], blocks[j] = blocks[j], blocks[i]
  return write(blocks)


def _move_text_outside(blocks, i, state):
  spans = write(blocks)
  spans[i] = types.Span(spans[i].author, spans[i].text + " moved")
  return spans


def _nest(blocks, i, state):
  author, name, content = blocks[i]
  blocks[i] = (author, name, f"{content}<think>")
  return write(blocks)


def _cut_in_two(blocks, i, state):
  spans = write(blocks)
  author, name, content = blocks[i]
  spans[i : i + 1] = [
    types.Span(author, f"<{name}>{content}"),
    types.Span(author, f"</{name}>"),
  ]
  return spans


def _wrong_budget(blocks, i, state):
  state["budget"] += 1 if state["scaffold"] else -1 - state["budget"]
  return write(blocks)


def _wrong_count(blocks, i, state):
  state["searches"] += 1
  return write(blocks)


def _other_phase(blocks, i, state):
  state["scaffold"] = not state["scaffold"]
  return write(blocks)


MUTATIONS = [
  _drop_block,
  _repeat_block,
  _drop_tag,
  _upper_case,
  _rename,
  _swap_author,
  _swap_blocks,
  _move_text_outside,
  _nest,
  _cut_in_two,
  _wrong_budget,
  _wrong_count,
  _other_phase,
]


@pytest.mark.parametrize("mutate", MUTATIONS)
@given(drawn=well_formed(), index=st.integers(0, 99))
@settings(max_examples=50)
def test_any_single_mutation_scores_0(mutate, drawn, index):
  blocks, state = drawn
  spans = mutate(blocks, index % len(blocks), state)
  assert scoring.check_format(spans, **state) == 0


PIECES = st.sampled_from(
  [f"<{slash}{name}>" for slash in ("", "/") for name in protocol.TAGS]
  + [T, S, I, A, "remaining=1; used=0; total=1", " ", "\n", "\ud800", "gold"]
)
ANY_TEXT = st.lists(PIECES | st.text(max_size=3), max_size=12).map("".join)
ANY_SPAN = st.builds(types.Span, st.sampled_from(types.Author), ANY_TEXT)


@given(
  st.lists(ANY_SPAN, max_size=6),
  st.lists(ANY_TEXT, max_size=2),
  st.integers(0, 3),
  st.integers(0, 3),
  st.booleans(),
)
def test_judge_accepts_any_text(spans, aliases, budget, searches, scaffold):
  verdict = scoring.judge(
    spans,
    golden_answers=aliases,
    budget=budget,
    searches=searches,
    scaffold=scaffold,
  )
  assert verdict.em in (0, 1) and verdict.format in (0, 1)
  assert not (verdict.em and verdict.answer is None)
  assert not (verdict.format and verdict.answer is None)


@given(st.lists(ANY_TEXT, max_size=5))
def test_an_answer_in_environment_text_does_not_count(texts):
  spans = [e(text) for text in [*texts, "<answer>gold</answer>"]]
  verdict = scoring.judge(
    spans, golden_answers=["gold"], budget=1, searches=0, scaffold=False
  )
  assert verdict == scoring.Verdict(answer=None, em=0, format=0)


@pytest.mark.parametrize(
  "piece", ["<think>", "</think>", T, "<answer>", A, "<", "x ", "<answer>\n"]
)
def test_a_megabyte_is_judged_in_linear_time(piece):
  def judge(text):
    verdict = scoring.judge(
      [m(text)], golden_answers=["a"], budget=3, searches=0, scaffold=False
    )
    assert verdict.format == 0

  growth.assert_linear(judge, piece * (1_000_000 // len(piece)))


@pytest.mark.parametrize(
  "text, aliases, expected",
  [
    ("He lives in the Paris area.", ["paris"], True),
    ("a party", ["art"], False),  # Whole words.
    ("state of the art", ["Art"], True),
    ("New  York City", ["new york"], True),
    ("York New", ["new york"], False),
    ("anything", ["the", ""], False),  # Nothing is left of these answers.
    ("", ["paris"], False),
  ],
)
def test_an_answer_is_contained_as_whole_words(text, aliases, expected):
  assert scoring.contains(text, aliases) is expected
