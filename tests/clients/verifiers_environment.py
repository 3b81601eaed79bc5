"""examples/verifiers, evaluated by verifiers with a scripted model.

The model makes as many searches as a question has hops, and answers right if
none of them was refused.
"""

from __future__ import annotations

import asyncio
import json
import os
import pathlib
import re
import subprocess
import sys
import types

import chat_endpoint
import pytest
import verifiers.v1 as vf

import anysearch_jax as aj
from examples import budgeted_search

ROOT = pathlib.Path(__file__).resolve().parents[2]
FOLDER = ROOT / "examples" / "verifiers"
sys.path.append(str(FOLDER))

import budgeted_questions  # noqa: E402
import budgeted_search_tool as tool  # noqa: E402

BUDGETS = (0, 1, 3, 8)  # Those of eval.toml.
QUESTIONS = budgeted_search.open_questions("", split="dev", count=3)
BY_TEXT = {question.text: question for question in QUESTIONS}


def question_of(messages):
  """Returns the question of a prompt."""
  return BY_TEXT[messages[0]["content"].rpartition("Question: ")[2]]


def queries(question):
  """Returns the query that finds each fact of a question, in order."""
  return [
    f"{fact['entity']} {fact['alternative' if fact['misses'] else 'relation']}"
    for fact in question.metadata["facts"]
  ]


def play(body):
  question = question_of(body["messages"])
  results = [m["content"] for m in body["messages"] if m["role"] == "tool"]
  if any("No search is left" in result for result in results):
    return chat_endpoint.Message("I guess: <answer>nobody</answer>")
  if len(results) < question.metadata["hops"]:
    query = queries(question)[len(results)]
    return chat_endpoint.Message(None, (chat_endpoint.search(query),))
  (golden,) = question.golden_answers
  return chat_endpoint.Message(f"So <answer>The {golden.upper()}.</answer>")


@pytest.fixture(scope="module")
def evaluation(tmp_path_factory):
  """Returns the traces of an evaluation, and what the model was sent."""
  output = tmp_path_factory.mktemp("outputs")
  binaries = pathlib.Path(sys.executable).parent
  with chat_endpoint.served(play) as server:
    command = [
      *(binaries / "vf-eval", "@", FOLDER / "eval.toml", "--no-rich"),
      *("--model", "scripted", "--output-dir", output),
      *("--client.base-url", server.url, "--client.api-key-var", "NO_KEY"),
      *("--env.taskset.split", "dev", "--env.taskset.count", "3"),
    ]
    environment = os.environ | {
      "PATH": f"{binaries}:{os.environ['PATH']}",
      "PYTHONPATH": f"{ROOT}:{FOLDER}",
    }
    subprocess.run(
      [*map(str, command)], env=environment, check=True, timeout=600
    )
  (file,) = output.rglob("traces.jsonl")
  episodes = map(json.loads, file.read_text().splitlines())
  return [trace for e in episodes for trace in e["traces"]], server.asked


def test_every_question_is_asked_with_every_budget(evaluation):
  traces, _ = evaluation
  assert sorted(trace["task"]["data"]["id"] for trace in traces) == sorted(
    f"{question.id}@{budget}" for question in QUESTIONS for budget in BUDGETS
  )
  assert all(trace["ok"] for trace in traces)


def test_reward_is_exact_match_and_searches_are_a_metric(evaluation):
  traces, _ = evaluation
  for trace in traces:
    data = trace["task"]["data"]
    budget = data["budget"]
    hops = question_of([{"content": data["prompt"]}]).metadata["hops"]
    enough = hops <= budget
    assert trace["rewards"]["exact_match"]["score"] == float(enough)
    assert trace["metrics"] == {
      "searches": min(hops, budget),
      "refused_searches": float(not enough),
    }
  assert {t["rewards"]["exact_match"]["score"] for t in traces} == {0.0, 1.0}


def test_model_is_told_its_budget_and_what_is_left(evaluation):
  _, asked = evaluation
  for body in asked:
    (offered,) = body["tools"]
    assert offered["function"]["name"] == "search"
    prompt, *results = [
      m["content"] for m in body["messages"] if m["role"] != "assistant"
    ]
    budget = int(re.search(r"at most (\d+) times", prompt)[1])
    for number, result in enumerate(results, 1):
      if number > budget:
        assert result == "No search is left: answer."
      else:
        assert result.endswith(f"Searches left: {budget - number}")


def test_searches_find_the_facts(evaluation):
  _, asked = evaluation
  whole = [b for b in asked if "Searches left" in b["messages"][-1]["content"]]
  assert whole
  for body in whole:
    *_, result = body["messages"]
    number = sum(m["role"] == "tool" for m in body["messages"])
    fact = question_of(body["messages"]).metadata["facts"][number - 1]
    assert f"{fact['entity']}\n" in result["content"]
    assert fact["value"] in result["content"]


def toolset(budget, retriever):
  made = tool.SearchToolset(tool.Config())
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(budgeted_search, "open_retriever", lambda path: retriever)
    asyncio.run(made.setup())
  made.state.corpus = QUESTIONS[0].corpus
  made.state.budget = budget
  return made


async def search_twice(made, query):
  return await asyncio.gather(made.search(query), made.search(query))


def test_parallel_searches_share_the_budget_of_their_rollout():
  made = toolset(1, budgeted_search.open_retriever(""))
  query = queries(QUESTIONS[0])[0]
  found, refused = asyncio.run(search_twice(made, query))
  assert found.endswith("Searches left: 0")
  assert refused == "No search is left: answer."
  made.state.rollout = "another"
  found, _ = asyncio.run(search_twice(made, query))
  assert found.endswith("Searches left: 0")


def test_failed_search_is_an_error_of_the_rollout_and_no_reward():
  class Broken:
    async def search(self, request):
      raise aj.RetrievalError("no answer within 1 s")

  made = toolset(1, Broken())
  for said in asyncio.run(search_twice(made, "anything")):
    assert "no answer within 1 s" in said
  assert (made.state.searches, made.state.refused_searches) == (0, 0)
  data = budgeted_questions.Data(golden_answers=("a",), corpus="", budget=1)
  task = budgeted_questions.Task(data)
  trace = types.SimpleNamespace(state=made.state, last_reply="a")
  with pytest.raises(vf.ToolsetError, match="no answer within 1 s"):
    asyncio.run(task.exact_match(trace))
