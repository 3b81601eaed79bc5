"""examples/openenv, played by OpenEnv's client over its WebSocket."""

from __future__ import annotations

import contextlib
import subprocess
import sys

import pytest
import waits
from openenv import core

import anysearch_jax as aj
from examples import budgeted_search
from examples.openenv import environment, models

QUESTIONS = budgeted_search.open_questions("", split="dev", count=40)
# A question that one search answers.
SEED, QUESTION = next(
  (seed, question)
  for seed, question in enumerate(QUESTIONS)
  if question.metadata["hops"] == 1
  and not question.metadata["facts"][0]["contradicted"]
)
FACT = QUESTION.metadata["facts"][0]
QUERY = (
  f"{FACT['entity']} {FACT['alternative' if FACT['misses'] else 'relation']}"
)


@pytest.fixture(scope="module")
def url():
  port = waits.free_port()
  address = f"http://127.0.0.1:{port}"
  flags = ["--split=dev", "--count=40", f"--port={port}", "--sessions=3"]
  command = [sys.executable, "-m", "examples.openenv", *flags]
  with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
    try:
      lines = iter(process.stderr.readline, "")
      assert any(address in line for line in lines)
      yield address
    finally:
      process.terminate()


@contextlib.contextmanager
def session(url):
  with core.GenericEnvClient(base_url=url).sync() as client:
    yield client


def act(client, kind, text):
  return client.step({"kind": kind, "text": text})


def test_right_answer_after_a_search_is_rewarded(url):
  with session(url) as client:
    first = client.reset(seed=SEED, budget=2, episode_id="mine")
    assert first.observation["question"] == QUESTION.text
    assert (first.observation["searches_left"], first.done) == (2, False)
    found = act(client, "search", QUERY)
    assert f"{FACT['entity']}\n" in found.observation["passages"][0]
    assert FACT["value"] in " ".join(found.observation["passages"])
    assert (found.observation["searches_left"], found.done) == (1, False)
    last = act(client, "answer", f"The {FACT['value'].upper()}.")
    assert (last.reward, last.done) == (1, True)
    state = client.state()
    assert (state["episode_id"], state["step_count"]) == ("mine", 2)
    assert (state["budget"], state["searches"]) == (2, 1)


def test_wrong_answer_without_a_search_earns_nothing(url):
  with session(url) as client:
    assert client.reset(seed=SEED, budget=0).observation["searches_left"] == 0
    last = act(client, "answer", "nobody")
    assert (last.reward, last.done) == (0, True)


def test_search_beyond_the_budget_is_refused_and_counted(url):
  with session(url) as client:
    client.reset(seed=SEED, budget=1)
    assert act(client, "search", QUERY).observation["passages"]
    for refused in (1, 2):
      beyond = act(client, "search", QUERY)
      assert beyond.observation["passages"] == []
      assert "No search is left" in beyond.observation["message"]
      assert (beyond.observation["searches_left"], beyond.done) == (0, False)
      state = client.state()
      assert (state["searches"], state["refused_searches"]) == (1, refused)
    assert act(client, "answer", FACT["value"]).reward == 1
    assert client.reset(seed=SEED, budget=1).observation["searches_left"] == 1
    assert client.state()["refused_searches"] == 0


def test_sessions_have_questions_and_budgets_of_their_own(url):
  with session(url) as one, session(url) as other:
    one.reset(seed=SEED, budget=1)
    assert other.reset(seed=SEED + 1, budget=5).observation["question"] == (
      QUESTIONS[(SEED + 1) % len(QUESTIONS)].text
    )
    assert act(one, "search", QUERY).observation["searches_left"] == 0
    assert act(other, "search", QUERY).observation["searches_left"] == 4
    assert act(one, "answer", FACT["value"]).reward == 1
    assert act(other, "answer", "nobody").reward == 0


def test_equal_seeds_begin_equal_episodes(url):
  with session(url) as one, session(url) as other:
    episodes = [one.reset(seed=seed) for seed in range(80)]
    again = [other.reset(seed=seed) for seed in range(80)]
  assert episodes == again
  texts = [episode.observation["question"] for episode in episodes]
  assert texts == 2 * [question.text for question in QUESTIONS]
  budgets = {episode.observation["searches_left"] for episode in episodes}
  assert budgets == {*environment.BUDGETS}


@pytest.mark.parametrize(
  "action",
  [
    {"kind": "fly", "text": QUERY},
    {"kind": "search"},
    {"kind": "search", "text": 3},
    {"kind": "search", "text": "a" * 10_001},
    {"kind": "search", "text": QUERY, "budget": 9},
  ],
)
def test_wrong_action_is_refused_and_costs_nothing(url, action):
  with session(url) as client:
    client.reset(seed=SEED, budget=1)
    with pytest.raises(RuntimeError, match="VALIDATION_ERROR"):
      client.step(action)
    assert client.state()["step_count"] == 0
    assert act(client, "search", QUERY).observation["passages"]


def test_action_without_an_episode_is_refused(url):
  with session(url) as client:
    with pytest.raises(RuntimeError, match="reset"):
      act(client, "search", QUERY)
    client.reset(seed=SEED, budget=1)
    assert act(client, "answer", "nobody").done
    with pytest.raises(RuntimeError, match="reset"):
      act(client, "answer", FACT["value"])


@pytest.mark.parametrize(
  "values", [{"budget": -1}, {"budget": "3"}, {"budget": True}, {"seed": "a"}]
)
def test_wrong_reset_names_the_field_and_the_value(url, values):
  ((name, value),) = values.items()
  with (
    session(url) as client,
    pytest.raises(RuntimeError, match=f"{name}: found {value!r}"),
  ):
    client.reset(**values)


def test_failed_search_is_an_error_and_is_not_charged():
  class Broken:
    async def search(self, request):
      raise aj.RetrievalError("no answer within 1 s")

  environments = environment.SearchEnvironment(QUESTIONS, Broken())
  environments.reset(seed=SEED, budget=1)
  for _ in range(2):
    with pytest.raises(aj.RetrievalError, match="no answer within"):
      environments.step(models.Action(kind="search", text=QUERY))
  assert environments.state.searches == 0
  answer = models.Action(kind="answer", text=FACT["value"])
  last = environments.step(answer)
  assert (last.reward, last.searches_left) == (1, 1)
