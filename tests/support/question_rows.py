"""A row of every question format, and the expected question."""

from __future__ import annotations

import numpy as np

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


def trained(target, **columns):
  """Returns a row of Search-R1."""
  return {
    "data_source": "nq",
    "prompt": [{"role": "user", "content": PROMPT}],
    "ability": "fact-reasoning",
    "reward_model": {"style": "rule", "ground_truth": target},
    "extra_info": {"split": "train", "index": 7},
    **columns,
  }


# A row, its format, and the expected question.
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
        "supporting": [
          {"title": "B", "text": "y"},
          {"title": "A", "text": "x"},
        ],
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
    trained(
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
    trained({"target": ["Jane Austen"]}),
    "search_r1",
    formats.Found(
      " who wrote Emma\n", ("Jane Austen",), "train_7", "nq", "train"
    ),
  ),
  "StepSearch": (
    trained(
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
    trained(
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
    trained("Jane Austen", question="who?"),
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
        "supporting": [
          {"title": "A", "text": "x y"},
          {"title": "B", "text": "z"},
        ],
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
        "HumanAnswers": ["Hills of Gloucestershire"],
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
      metadata={
        "QuestionSource": "http://www.triviacountry.com/",
        "official_answers": ["cotswolds", "Hills of Gloucestershire"],
      },
    ),
  ),
  "Bamboogle": (
    {"Question": "Who was president?", "Answer": "james madison"},
    "bamboogle",
    formats.Found("Who was president?", ("james madison",)),
  ),
}
