"""examples/budgeted_search: its questions, its passages and its budget."""

from __future__ import annotations

import asyncio
import json

import commands
import pytest

import anysearch_jax as aj
from anysearch_jax.launch import prepare_data
from examples import budgeted_search

PASSAGES = [
  aj.Passage("0", "Orlan bakery", "It was opened in 1931 by Mira Tasse."),
  aj.Passage("1", "Veddel", "A river\u2028of 84 km.\nIt is cold."),
]


def test_questions_are_those_that_prepare_data_wrote(tmp_path):
  rows = [
    {"question": "Who opened the Orlan bakery?", "answer": ["Mira Tasse"]},
    {"question": "How long is the Veddel?", "answer": ["84 km", "84"]},
    {"question": "Is the Veddel cold?", "answer": ["yes"]},
  ]
  file = tmp_path / "mine_train.jsonl"
  file.write_text("".join(json.dumps(row) + "\n" for row in rows))
  output = tmp_path / "data"
  flags = ("--mix=mine", f"--output={output}")
  assert not commands.run(prepare_data, f"--input=mine:train={file}", *flags)
  path = output / "mine_train.parquet"
  questions = budgeted_search.open_questions(path, split="train", count=2)
  assert [(q.text, list(q.golden_answers)) for q in questions] == [
    (row["question"], row["answer"]) for row in rows[:2]
  ]


def test_questions_of_the_world_are_those_of_its_evaluations():
  questions = budgeted_search.open_questions("", split="dev", count=5)
  assert questions == aj.World().evaluation_questions(5, "dev")


def test_passages_of_a_file_are_found(tmp_path):
  path = tmp_path / "passages.jsonl"
  with path.open("w", encoding="utf-8") as lines:
    for passage in PASSAGES:
      row = {"id": passage.id, "contents": passage.contents}
      lines.write(json.dumps(row, ensure_ascii=False) + "\n")
  retriever = budgeted_search.open_retriever(str(path))
  search = budgeted_search.BudgetedSearch(retriever, corpus="", budget=1)
  (found,) = aj.run(search.search("veddel river"))
  assert (found.id, found.contents) == ("1", PASSAGES[1].contents)
  assert aj.run(search.search("orlan")) is None
  assert (search.left, search.refused) == (0, 1)


class Slow:
  """Answers when it is told to; fails the query `bad`."""

  def __init__(self):
    self.free = asyncio.Event()

  async def search(self, request):
    await self.free.wait()
    if request.query == "bad":
      raise aj.RetrievalError("no answer")
    return PASSAGES


async def _search_in_parallel(budget, queries):
  retriever = Slow()
  search = budgeted_search.BudgetedSearch(retriever, "", budget)
  tasks = [asyncio.create_task(search.search(query)) for query in queries]
  await asyncio.sleep(0)
  retriever.free.set()
  answers = await asyncio.gather(*tasks, return_exceptions=True)
  return search, answers


def test_parallel_searches_are_counted_before_they_are_answered():
  search, answers = asyncio.run(_search_in_parallel(2, ["a", "b", "c"]))
  assert answers == [PASSAGES, PASSAGES, None]
  assert (search.left, search.refused) == (0, 1)


def test_failed_search_is_not_charged():
  search, (error, found) = asyncio.run(_search_in_parallel(2, ["bad", "a"]))
  assert isinstance(error, aj.RetrievalError) and found == PASSAGES
  assert (search.left, search.refused) == (1, 0)


def test_cancelled_search_is_not_charged():
  async def cancel():
    search = budgeted_search.BudgetedSearch(Slow(), "", budget=1)
    with pytest.raises(TimeoutError):
      await asyncio.wait_for(search.search("a"), timeout=0.01)
    return search.left

  assert asyncio.run(cancel()) == 1
