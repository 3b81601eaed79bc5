"""Rows of every supported format, and malformed rows."""

from __future__ import annotations

import json

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
    ("a", ("a",)),
    ("a<|answer_split|>b", ("a", "b")),
    ([1912, 3.5], ("1912", "3.5")),
    ([], ()),
    (None, ()),
    # Answers that contain brackets and quotes themselves.
    (["[x]", "['Til Tuesday]", "[1912]"], ("[x]", "['Til Tuesday]", "[1912]")),
    ("[Jane Austen]", ("[Jane Austen]",)),
    ("O'Neill", ("O'Neill",)),
  ],
)
def test_answers_may_be_list_array_or_string(value, expected):
  assert formats.answers(value) == expected


@pytest.mark.parametrize(
  ("value", "expected"),
  [
    ("['x', 'y']", ("x", "y")),
    (" [ 'x' ] ", ("x",)),
    # NumPy's output without commas, which Python would parse as "xy".
    ("['x' 'y']", ("x", "y")),
    ("['x'\n \"O'Neill, J.\"]", ("x", "O'Neill, J.")),
    ("['O\\'Neill', 'a, b']", ("O'Neill", "a, b")),
    ("[1912, 'x', -3.5]", ("1912", "x", "-3.5")),
    ("[]", ()),
    (["['x', 'y']", "z"], ("x", "y", "z")),
  ],
)
def test_printed_list_is_parsed_into_answers(value, expected):
  assert formats.answers(value) == expected


def test_year_written_as_float_by_pandas_is_an_integer():
  assert formats.answers([1912.0, "x"]) == ("1912", "x")


@pytest.mark.parametrize(
  ("value", "message"),
  [
    ([float("nan")], "an answer that is nan"),
    (["x", None], "an answer that is a NoneType"),
    ("['x', nan]", "missing in the text of a list"),
    ("[NaN]", "an answer that is nan"),
    ('["x", null]', "an answer that is a NoneType"),
    ("['x', 'y", "the text of a list or object"),
    ("['x' and 'y']", "the text of a list or object"),
    ("{'target': ['x']}", "the text of a list or object"),
    ("array(['x'], dtype=object)", "the text of a list or object"),
  ],
)
def test_missing_or_damaged_answers_are_rejected(value, message):
  with pytest.raises(formats.MalformedError, match=message):
    formats.answers(value)


def test_question_has_repaired_answers():
  row = {"question": "who", "golden_answers": "['x', 'y']"}
  found = formats.read(row, "flashrag")
  assert found.answers == ("x", "y")


@pytest.mark.parametrize(
  ("context", "text"),
  [
    ([["A", ["One.", " Two."]], ["A", ["Other."]]], "One. Two."),
    ({"title": ["A"], "sentences": [["One.", "Two."]]}, "One. Two."),
    ({"title": ["A"], "content": [["One.", "Two."]]}, "One. Two."),
    ([["B", ["One."]]], None),
    ("A text.", None),
    ([["A"], 7, ["A", "One."]], None),
    (None, None),
  ],
)
def test_a_supporting_passage_has_the_sentences_of_its_title(context, text):
  row = {"question": "a", "answer": "b", "supporting_facts": [["A", 1]]}
  found = formats.read(row | {"context": context}, "hotpotqa")
  expected = {"title": "A"} | ({} if text is None else {"text": text})
  assert found.metadata["supporting"] == [expected]


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
    (question_rows.trained("x", prompt=None), "search_r1", "neither a ques"),
    (question_rows.trained("x", prompt="a\nb"), "search_r1", "a prompt with"),
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
def test_malformed_row_gives_the_reason(row, format_, message):
  with pytest.raises(formats.MalformedError, match=message):
    formats.read(row, format_)


@pytest.mark.parametrize(
  ("found", "hops"), [(2, 2), (2.0, 2), (float("nan"), None), (None, None)]
)
def test_hops_may_be_floats_from_pandas(found, hops):
  row = {"question": "a", "answer": "b", "n_hops": found}
  assert formats.read(row, "plain").hops == hops


def test_unknown_columns_have_no_format():
  assert formats.recognize({"text": "a", "label": 1}) is None


CONTEXT = [["Emma", ["Emma is a novel.", "By Austen."]], ["Bath", ["A city."]]]
FACTS = [["Emma", 0]]
SUPPORTING = [{"title": "Emma", "text": "Emma is a novel. By Austen."}]


def as_hub_copy(row):
  """Returns a row as the hub has it, with nested values as JSON text."""
  return {
    name: value if isinstance(value, str) else json.dumps(value)
    for name, value in row.items()
  }


def test_nested_columns_may_be_json_text():
  row = {
    "_id": "a",
    "type": "compositional",
    "question": "Who wrote Emma?",
    "context": CONTEXT,
    "supporting_facts": FACTS,
    "evidences": [["Emma", "author", "Austen"]],
    "answer": "Austen",
  }
  found = formats.read(row, "hotpotqa")
  assert found.metadata["supporting"] == SUPPORTING
  assert formats.read(as_hub_copy(row), "hotpotqa") == found


def test_columns_of_lists_may_be_a_list_of_objects():
  paragraphs = [
    {"title": "Emma", "paragraph_text": "A novel.", "is_supporting": True},
    {"title": "Bath", "paragraph_text": "A city.", "is_supporting": False},
  ]
  steps = [{"question": "Who wrote Emma?", "answer": "Austen"}]
  row = {
    "question": "Who?",
    "answer": "Austen",
    "answer_aliases": ["Jane Austen"],
    "paragraphs": paragraphs,
    "question_decomposition": steps,
  }
  found = formats.read(row, "musique")
  assert found.answers == ("Austen", "Jane Austen")
  assert found.metadata["supporting"][0]["text"] == "A novel."
  lists = {
    name: {key: [item[key] for item in row[name]] for key in row[name][0]}
    for name in ("paragraphs", "question_decomposition")
  }
  assert formats.read(row | lists, "musique") == found
  assert formats.read(as_hub_copy(row), "musique") == found
  lists["paragraphs"]["title"].pop()
  with pytest.raises(formats.MalformedError, match="of different lengths"):
    formats.read(row | lists, "musique")


@pytest.mark.parametrize("kind", [dict, json.dumps])
def test_answer_objects_of_published_sets_are_read(kind):
  trivia = {
    "value": "Sinclair Lewis",
    "aliases": ["Lewis, Sinclair", "Harry Lewis"],
    "normalized_aliases": ["lewis sinclair", "harry lewis"],
    "normalized_value": "sinclair lewis",
    "type": "WikipediaEntity",
  }
  row = {"question": "Who?", "question_id": "tc_1", "answer": kind(trivia)}
  assert formats.recognize(row) == "plain"
  found = formats.read(row, "plain")
  assert found.id == "tc_1"
  assert found.answers[:2] == ("Sinclair Lewis", "Lewis, Sinclair")
  assert found.metadata["official_answers"] == trivia["normalized_aliases"]
  squad = {"text": ["Paris", "paris"], "answer_start": [3, 3]}
  row = {"question": "Where?", "answers": kind(squad)}
  assert formats.recognize(row) == "answers"
  assert formats.read(row, "answers").answers == ("Paris", "paris")


@pytest.mark.parametrize("value", ["Paris", ["Paris"], "['Paris']"])
def test_answers_may_stand_where_answer_is_expected(value):
  row = {"question": "Where?", "answers": value}
  assert formats.read(row, formats.recognize(row)).answers == ("Paris",)


def test_a_damaged_context_is_not_lost_in_silence():
  row = {
    "question": "Who?",
    "answer": "Austen",
    "supporting_facts": FACTS,
    "context": str(CONTEXT),
  }
  with pytest.raises(formats.MalformedError, match="context that is no JSON"):
    formats.read(row, "hotpotqa")
  found = formats.read(row | {"context": "Emma is a novel."}, "hotpotqa")
  assert found.metadata["supporting"] == [{"title": "Emma"}]
