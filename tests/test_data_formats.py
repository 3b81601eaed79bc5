"""Rows of every format that questions come in, and rows that are none."""

from __future__ import annotations

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import question_rows

from anysearch_jax.data import formats


@pytest.mark.parametrize("name", question_rows.ROWS)
def test_each_format_is_recognised_and_read(name):
  row, format_, found = question_rows.ROWS[name]
  assert formats.recognize(row) == format_
  assert formats.read(row, format_) == found


@pytest.mark.parametrize(
  ("value", "expected"),
  [
    (["a", "b"], ("a", "b")),
    (("a",), ("a",)),
    (np.array(["a", "b"], object), ("a", "b")),
    ("a", ("a",)),
    ("a<|answer_split|>b", ("a", "b")),
    ([1912, 3.5], ("1912", "3.5")),
    (35, ("35",)),
    ([], ()),
    (None, ()),
  ],
)
def test_answers_come_as_list_array_or_string(value, expected):
  assert formats.answers(value) == expected


@pytest.mark.parametrize(
  ("row", "format_", "message"),
  [
    ({"question": "a"}, "plain", "no answer"),
    ({"question": None, "answer": "b"}, "plain", "no question"),
    ({"question": "a", "answer": [True]}, "plain", "answer that is a bool"),
    ({"question": "a", "answer": {"b": 1}}, "plain", "that is a dict"),
    ({"id": [1], "question": "a", "answer": "b"}, "plain", "id that is a list"),
    (
      {"question": "a", "golden_answers": ["b"], "metadata": [1]},
      "flashrag",
      "metadata that is a list",
    ),
    (
      {"question": "a", "golden_answers": ["b"], "metadata": {"hops": "two"}},
      "flashrag",
      "hops that are no small number",
    ),
    ({"question": "a", "answer": "b", "hops": 2.5}, "plain", "small number"),
    ({"question": "a", "possible_answers": "b"}, "popqa", "no JSON list"),
    (
      question_rows.trained("x", prompt=None),
      "search_r1",
      "neither a question nor",
    ),
    (
      question_rows.trained("x", prompt="one\ntwo"),
      "search_r1",
      "a prompt without",
    ),
    (
      {"question": "a", "answer": "b", "supporting_facts": [7]},
      "hotpotqa",
      "facts without titles",
    ),
    (
      {"question": "a", "answer": "b", "paragraphs": [7]},
      "musique",
      "paragraphs that holds something else",
    ),
  ],
)
def test_a_row_that_is_no_question_says_why(row, format_, message):
  with pytest.raises(formats.MalformedError, match=message):
    formats.read(row, format_)


@pytest.mark.parametrize(
  ("found", "hops"), [(2, 2), (2.0, 2), (float("nan"), None), (None, None)]
)
def test_hops_may_have_been_through_pandas(found, hops):
  row = {"question": "a", "answer": "b", "n_hops": found}
  assert formats.read(row, "plain").hops == hops


def test_unknown_columns_are_no_format():
  assert formats.recognize({"text": "a", "label": 1}) is None


_VALUES = st.recursive(
  st.none()
  | st.booleans()
  | st.integers()
  | st.floats()
  | st.text(max_size=5)
  | st.sampled_from(["Question: a", '{"target": 1}', "[]", "2hop"]),
  lambda inner: (
    st.lists(inner, max_size=3)
    | st.dictionaries(
      st.sampled_from(
        "target title content role ground_truth Value Aliases n_hops split "
        "supporting_facts paragraphs question answer dataset".split()
      ),
      inner,
      max_size=4,
    )
  ),
  max_leaves=6,
)
_COLUMNS = sorted(
  {"id", "_id", "prompt", "metadata", "extra_info", "data_source"}
  | {"supporting_facts", "question_decomposition", "gold_doc_ids", "n_hops"}
  | set().union(*(columns for columns, _ in formats.FORMATS.values()))
)


@hypothesis.given(data=st.data(), format_=st.sampled_from([*formats.FORMATS]))
def test_any_row_is_a_question_or_malformed(data, format_):
  row = {name: data.draw(_VALUES) for name in formats.FORMATS[format_][0]}
  row |= data.draw(st.dictionaries(st.sampled_from(_COLUMNS), _VALUES))
  try:
    found = formats.read(row, format_)
  except formats.MalformedError as error:
    assert str(error)
    return
  assert isinstance(found.question, str)
  assert all(isinstance(answer, str) for answer in found.answers)
  assert found.hops is None or 0 <= found.hops < 100
