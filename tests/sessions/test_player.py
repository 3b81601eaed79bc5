"""Programs that play a rollout: what is trained on, and what is not.

Each plays over HTTP against a scripted engine, beside well-behaved ones.
"""

import asyncio
import sys

import httpx2
import pytest
import scripted
from test_session import CODEC, SEARCH

from anysearch_jax import budgets, types
from anysearch_jax import config as config_lib
from anysearch_jax.host import loop
from anysearch_jax.methods import systems
from anysearch_jax.rollout import driver
from anysearch_jax.sessions import player

TOOLS = [{"type": "function", "function": SEARCH}]
QUESTIONS = [types.Question(f"q{n}", f"Q{n}?", ("x",)) for n in range(3)]


def rollout(program, tmp_path, *, text=None, config=None, **agents):
  """Plays three questions, twice each, by a function or another program."""
  if text is not None:
    path = tmp_path / "mine.py"
    path.write_text(text)
    program = f"{path}:{program}"
  limits = config_lib.EpisodeConfig(
    prompts="program", max_context=3000, max_generated=1000
  )
  agents.setdefault("states_budget", False)
  opened = player.ProgramPlayer(
    config_lib.AgentsConfig(program=program, **agents),
    config_lib.SamplingConfig(),
  )
  parts = driver.EpisodeParts(
    scripted.Engine(lambda request: "x"),
    scripted.Retriever(),
    limits,
    CODEC,
    systems.of_episode(limits),
    trains=True,
    player=opened,
  )
  assignments = [
    driver.Assignment(index, question, budgets.of(2), scaffold=False)
    for index, question in enumerate(QUESTIONS)
  ]
  try:
    played = loop.run(driver.run_groups(assignments, parts, group=2, rollout=0))
  finally:
    opened.close()
  return played, opened.counters


ASKS = """
import openai

def client(task):
  return openai.OpenAI(
    base_url=task.base_url, api_key=task.api_key, max_retries=0
  )

def ask(task, **more):
  return client(task).chat.completions.create(
    model=task.model,
    messages=[{"role": "user", "content": task.question}],
    **more,
  )

def is_bad(task):
  return task.question_id == "q1"

def good(task):
  return ask(task).choices[0].message.content
"""


def test_a_function_plays_over_openai_s_client(tmp_path):
  played, counters = rollout("good", tmp_path, text=ASKS)
  assert not played.failed and len(played.groups) == 3
  for group in played.groups:
    for t in group.trajectories:
      assert t.reported_answer == "x" and t.outcome is types.Outcome.ANSWERED
  assert +counters == {"sessions": 6, "turns": 6}


BAD = {
  "dies": ("raise SystemError('out of order')", "SystemError: out of order"),
  "ends_without_a_turn": ("return 'x'", "no turn"),
  "hangs": ("ask(task); import time; time.sleep(30)", "within 2 seconds"),
  "answers_twice": (
    "ask(task); import httpx2\n"
    "    head = {'authorization': 'Bearer ' + task.api_key}\n"
    "    for _ in range(2):\n"
    "      httpx2.post(task.outcome_url, json={'answer': 'x'}, headers=head)",
    "twice",
  ),
  "reports_and_returns": (
    "ask(task); import httpx2\n"
    "    head = {'authorization': 'Bearer ' + task.api_key}\n"
    "    httpx2.post(task.outcome_url, json={'answer': 'x'}, headers=head)\n"
    "    return 'y'",
    "twice",
  ),
  "sends_50_megabytes": (
    "ask(task)\n"
    "    try: client(task).chat.completions.create(model='m', messages=["
    "{'role': 'user', 'content': 'x' * 50_000_000}])\n"
    "    except openai.APIError: pass",
    "too large",
  ),
  "exits": ("raise SystemExit(3)", "SystemExit: 3"),
  "stops": ("raise StopIteration", "StopIteration"),
  "returns_a_huge_number": ("ask(task); return 10 ** 400", "expected None"),
  "returns_an_infinite_number": ("ask(task); return 1e39", "expected None"),
  "returns_a_list": ("ask(task); return ['x']", "expected None, an answer"),
}


@pytest.mark.parametrize("name", BAD)
def test_nothing_of_a_program_that_misbehaves_is_trained_on(name, tmp_path):
  lines, reason = BAD[name]
  text = f"{ASKS}\ndef mixed(task):\n  if is_bad(task):\n    {lines}\n"
  text += "    return None\n  return good(task)\n"
  played, counters = rollout(
    "mixed", tmp_path, text=text, deadline=2.0, turns=20, segments=99
  )
  # The group is sampled again, fails again and is dropped; the others stay.
  assert [g.question.id for g in played.groups] == ["q0", "q2"]
  assert played.dropped == 1 and played.failed == 4
  assert reason in played.reason
  assert sum(n for key, n in counters.items() if "spoiled" in key) == 4


@pytest.mark.parametrize("error", ["SystemExit", "asyncio.CancelledError"])
def test_a_coroutine_that_raises_anything_loses_its_own_episode(
  error, tmp_path
):
  text = f"""{ASKS}
import asyncio

async def mixed(task):
  if is_bad(task):
    raise {error}
  return await asyncio.to_thread(good, task)
"""
  played, _ = rollout("mixed", tmp_path, text=text)
  assert [g.question.id for g in played.groups] == ["q0", "q2"]
  assert played.failed == 4
  assert error.rpartition(".")[2] in played.reason


def test_a_program_need_not_handle_the_refusal_of_a_spent_budget(tmp_path):
  text = f"{ASKS}\ndef endless(task):\n  while True: ask(task)\n"
  played, counters = rollout("endless", tmp_path, text=text, turns=3)
  assert not played.failed and len(played.groups) == 3
  for group in played.groups:
    for t in group.trajectories:
      assert t.outcome is types.Outcome.TRUNCATED
      assert t.reported_answer == "" and "agents.turns" in t.reason
  assert counters["turns"] == 18


def test_a_flood_of_requests_is_refused_and_not_trained_on(tmp_path):
  text = f"""{ASKS}
import concurrent.futures

def flood(task):
  if not is_bad(task):
    return good(task)
  with concurrent.futures.ThreadPoolExecutor(40) as threads:
    calls = [threads.submit(ask, task) for _ in range(200)]
  for call in calls:
    call.exception()
"""
  played, counters = rollout("flood", tmp_path, text=text, turns=999)
  assert [g.question.id for g in played.groups] == ["q0", "q2"]
  assert "too many requests" in played.reason
  assert counters["spoiled_too_many_requests"] == 4


def test_a_program_that_opens_another_s_session_loses_its_own(tmp_path):
  text = f"""{ASKS}
import threading

urls = {{}}
first_came = threading.Event()

def intrude(task):
  urls[task.question_id] = task.base_url
  if task.question_id == "q0":
    first_came.set()
  if is_bad(task):
    first_came.wait(20)
    intruder = openai.OpenAI(
      base_url=urls["q0"], api_key=task.api_key, max_retries=0
    )
    try:
      intruder.models.list()
    except openai.AuthenticationError:
      pass
  return good(task)
"""
  played, counters = rollout("intrude", tmp_path, text=text)
  assert [g.question.id for g in played.groups] == ["q0", "q2"]
  assert "session of another" in played.reason
  assert counters["spoiled_intruder"] == 4


def test_a_command_plays_with_the_variables_of_openai(tmp_path):
  path = tmp_path / "agent.py"
  path.write_text(
    "import json, sys, openai\n"
    "task = json.load(sys.stdin)\n"
    "reply = openai.OpenAI().chat.completions.create(model='any',"
    " messages=[{'role': 'user', 'content': task['question']}])\n"
    "print(reply.choices[0].message.content)\n"
  )
  played, _ = rollout(f"{sys.executable} {path}", tmp_path)
  assert not played.failed
  # It reported nothing: its last message is the answer.
  environment = systems.environment("program")
  for group in played.groups:
    for t in group.trajectories:
      assert t.reported_answer is None
      assert environment.judge(t).answer == "x"


def test_the_endpoint_is_closed_after_the_run(tmp_path):
  text = f"{ASKS}\nseen = []\ndef note(task):\n  seen.append(task.base_url)\n"
  text += "  open(__file__ + '.url', 'w').write(task.base_url)\n"
  text += "  return good(task)\n"
  rollout("note", tmp_path, text=text)
  url = (tmp_path / "mine.py.url").read_text()
  with pytest.raises(httpx2.ConnectError):
    httpx2.get(f"{url}/models")


def test_cancelling_the_rollout_ends_the_programs(tmp_path):
  text = f"{ASKS}\nasync def wait(task):\n  import asyncio\n"
  text += "  open(__file__ + '.began', 'w').close()\n"
  text += "  try: await asyncio.sleep(60)\n"
  text += "  finally: open(__file__ + '.ended', 'w').close()\n"
  path = tmp_path / "mine.py"
  path.write_text(text)
  opened = player.ProgramPlayer(
    config_lib.AgentsConfig(program=f"{path}:wait"),
    config_lib.SamplingConfig(),
  )
  limits = config_lib.EpisodeConfig(prompts="program")
  parts = driver.EpisodeParts(
    scripted.Engine(["x"]),
    scripted.Retriever(),
    limits,
    CODEC,
    systems.of_episode(limits),
    player=opened,
  )

  async def run():
    playing = asyncio.ensure_future(
      driver.run_episode(
        QUESTIONS[0],
        parts,
        budget=1,
        scaffold=False,
        address=types.Address(0, 0, 0),
      )
    )
    while not (tmp_path / "mine.py.began").exists():
      await asyncio.sleep(0.01)
    playing.cancel()
    with pytest.raises(asyncio.CancelledError):
      await playing
    async with asyncio.timeout(10):
      while not (tmp_path / "mine.py.ended").exists():
        await asyncio.sleep(0.01)

  try:
    loop.run(run())
  finally:
    opened.close()
