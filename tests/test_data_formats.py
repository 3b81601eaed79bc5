"""Rows of every format that questions come in, and rows that are none."""

from __future__ import annotations

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from anysearch_jax.data import formats

PROMPT = "Answer the given question. Question: who wrote Emma\n"
PARAGRAPHS = [
  {"idx": 0, "title": "Bath", "paragraph_text": "A city.", "is_supporting": 0},
  {"idx": 1, "title": "Emma", "paragraph_text": "By J.", "is_supporting": True},
]
STEPS = [
  {"id": 1, "question": "Emma >> author", "answer": "J", "x": [1]},
  {"id": 2, "question": "#1 >> born", "answer": "Steventon"},
]


def _trained(target, **columns):
  return {
    "data_source": "nq",
    "prompt": [{"role": "user", "content": PROMPT}],
    "ability": "fact-reasoning",
    "reward_model": {"style": "rule", "ground_truth": target},
    "extra_info": {"split": "train", "index": 7},
    **columns,
  }


# A row, its format, and what stands in it.
ROWS = {
  "FlashRAG": (
    {"id": "test_0", "question": "who", "golden_answers": ["a", "b"]},
    "flashrag",
    formats.Found("who", ("a", "b"), "test_0"),
  ),
  "FlashRAG with the evidence of HotpotQA": (
    {
      "id": "dev_1",
      "question": "who?",
      "golden_answers": ["a"],
      "metadata": {
        "type": "bridge",
        "level": "hard",
        "supporting_facts": {"title": ["B", "A", "B"], "sent_id": [0, 1, 2]},
        "context": {"title": ["A", "B"], "sentences": [["x"], ["y"]]},
      },
    },
    "flashrag",
    formats.Found(
      "who?",
      ("a",),
      "dev_1",
      hops=2,
      metadata={
        "type": "bridge",
        "level": "hard",
        "supporting": [{"title": "B"}, {"title": "A"}],
      },
    ),
  ),
  "FlashRAG with gold passages": (
    {
      "id": 3,
      "question": "who?",
      "golden_answers": ["a"],
      "metadata": {
        "dataset": "musique",
        "split": "dev",
        "gold_doc_ids": [15, "16"],
        "n_hops": 4,
      },
    },
    "flashrag",
    formats.Found(
      "who?",
      ("a",),
      "3",
      "musique",
      "dev",
      4,
      {"gold_doc_ids": ["15", "16"]},
    ),
  ),
  "Search-R1": (
    _trained(
      {"target": np.array(["Jane Austen", "Austen"])},
      id="train_7",
      question="who wrote Emma?",
      golden_answers=["not these"],
      metadata=None,
    ),
    "search_r1",
    formats.Found(
      "who wrote Emma?", ("Jane Austen", "Austen"), "train_7", "nq", "train"
    ),
  ),
  "Search-R1 without the question": (
    _trained({"target": ["Jane Austen"]}),
    "search_r1",
    formats.Found(
      " who wrote Emma\n", ("Jane Austen",), "train_7", "nq", "train"
    ),
  ),
  "StepSearch": (
    _trained(
      {
        "target": ["Steventon"],
        "search_keys": [["Emma author", "who wrote Emma"], ["Austen born"]],
      },
      question="where?",
      data_source="musique",
      extra_info={
        "split": "train",
        "index": 0,
        "support_docs": [{"title": "Emma", "paragraph_text": "By J."}],
      },
    ),
    "search_r1",
    formats.Found(
      "where?",
      ("Steventon",),
      "train_0",
      "musique",
      "train",
      1,
      {
        "supporting": [{"title": "Emma", "text": "By J."}],
        "search_keys": [["Emma author", "who wrote Emma"], ["Austen born"]],
      },
    ),
  ),
  "DeepResearcher": (
    _trained(
      "Jane Austen<|answer_split|>Austen",
      prompt=[
        {"role": "system", "content": "Question: none"},
        {"role": "user", "content": "who wrote Emma"},
      ],
    ),
    "search_r1",
    formats.Found(
      "who wrote Emma", ("Jane Austen", "Austen"), "train_7", "nq", "train"
    ),
  ),
  "Agentic-RAG": (
    _trained("Jane Austen", question="who?"),
    "search_r1",
    formats.Found("who?", ("Jane Austen",), "train_7", "nq", "train"),
  ),
  "AnySearch": (
    {
      "question": "who?",
      "label": '{"target": ["Jane Austen"]}',
      "metadata": {
        "dataset": "nq",
        "split": "test",
        "index": 5,
        "flashrag_revision": "87aab18",
      },
    },
    "anysearch",
    formats.Found(
      "who?",
      ("Jane Austen",),
      "test_5",
      "nq",
      "test",
      metadata={"flashrag_revision": "87aab18"},
    ),
  ),
  "HotpotQA": (
    {
      "_id": "5a8b",
      "answer": "yes",
      "question": "both?",
      "supporting_facts": [["A", 0], ["A", 1], ["B", 0]],
      "context": [["A", ["x", "y"]], ["B", ["z"]]],
      "type": "comparison",
      "level": "hard",
    },
    "hotpotqa",
    formats.Found(
      "both?",
      ("yes",),
      "5a8b",
      hops=2,
      metadata={
        "type": "comparison",
        "level": "hard",
        "supporting": [{"title": "A"}, {"title": "B"}],
      },
    ),
  ),
  "2WikiMultihopQA": (
    {
      "_id": "8813",
      "type": "bridge_comparison",
      "question": "which?",
      "context": [],
      "supporting_facts": [["A", 0], ["B", 0], ["C", 1], ["D", 0]],
      "evidences": [["A", "director", "C"]],
      "answer": "A",
    },
    "hotpotqa",
    formats.Found(
      "which?",
      ("A",),
      "8813",
      hops=4,
      metadata={
        "type": "bridge_comparison",
        "supporting": [{"title": t} for t in "ABCD"],
      },
    ),
  ),
  "MuSiQue": (
    {
      "id": "3hop1__1_2_3",
      "paragraphs": PARAGRAPHS,
      "question": "where?",
      "question_decomposition": STEPS,
      "answer": "Steventon",
      "answer_aliases": ["Steventon, Hampshire"],
      "answerable": True,
    },
    "musique",
    formats.Found(
      "where?",
      ("Steventon", "Steventon, Hampshire"),
      "3hop1__1_2_3",
      hops=3,
      metadata={
        "supporting": [{"title": "Emma", "text": "By J."}],
        "sub_questions": [
          {"question": "Emma >> author", "answer": "J"},
          {"question": "#1 >> born", "answer": "Steventon"},
        ],
      },
    ),
  ),
  "MuSiQue without an answer": (
    {
      "id": "2hop__1_2",
      "paragraphs": [],
      "question": "where?",
      "answer": "of its twin",
      "answer_aliases": [],
      "answerable": False,
    },
    "musique",
    formats.Found("where?", (), "2hop__1_2", hops=2),
  ),
  "NQ-open": (
    {"question": "who", "answer": ["a", "b"]},
    "plain",
    formats.Found("who", ("a", "b")),
  ),
  "PopQA": (
    {
      "id": "4222361",
      "subj": "George Rankin",
      "prop": "occupation",
      "s_pop": "142",
      "o_uri": "",
      "question": "What is George Rankin's occupation?",
      "possible_answers": '["politician", "political leader"]',
    },
    "popqa",
    formats.Found(
      "What is George Rankin's occupation?",
      ("politician", "political leader"),
      "4222361",
      metadata={
        "subj": "George Rankin",
        "prop": "occupation",
        "s_pop": "142",
      },
    ),
  ),
  "TriviaQA": (
    {
      "Answer": {
        "Aliases": ["Cotswolds", "The Cotswolds"],
        "MatchedWikiEntityName": "",
        "NormalizedAliases": ["cotswolds"],
        "NormalizedValue": "cotswold hills",
        "Type": "WikipediaEntity",
        "Value": "Cotswold Hills",
      },
      "EntityPages": [{"Title": "x"}],
      "Question": "Which hills?",
      "QuestionId": "tc_3",
      "QuestionSource": "http://www.triviacountry.com/",
    },
    "triviaqa",
    formats.Found(
      "Which hills?",
      ("Cotswold Hills", "Cotswolds", "The Cotswolds", "cotswolds"),
      "tc_3",
      metadata={"QuestionSource": "http://www.triviacountry.com/"},
    ),
  ),
  "Bamboogle": (
    {"Question": "Who was president?", "Answer": "james madison"},
    "bamboogle",
    formats.Found("Who was president?", ("james madison",)),
  ),
}


@pytest.mark.parametrize("name", ROWS)
def test_each_format_is_recognised_and_read(name):
  row, format_, found = ROWS[name]
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
    (_trained("x", prompt=None), "search_r1", "neither a question nor"),
    (_trained("x", prompt="one\ntwo"), "search_r1", "a prompt without"),
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
