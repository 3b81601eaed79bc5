"""Programs of each kind: what they return, how they fail, that they end."""

import asyncio
import json
import sys
import time

import pytest
import uvicorn
from starlette import applications, requests, responses, routing

from anysearch_jax.host import loop
from anysearch_jax.sessions import programs, turns

TASK = programs.Task(
  base_url="http://127.0.0.1:1/sessions/a/v1",
  api_key="key",
  model="policy",
  outcome_url="http://127.0.0.1:1/sessions/a/outcome",
  question_id="q1",
  question="Who?",
  corpus="c",
  budget={"searches": 3},
  scaffold=True,
)


def play(program, task=TASK, seconds=20.0):
  async def run():
    try:
      async with asyncio.timeout(seconds):
        return await program.play(task)
    finally:
      await program.close()

  return loop.run(run())


@pytest.mark.parametrize(
  "value, report",
  [
    (None, turns.Report()),
    ("x", turns.Report(answer="x")),
    ("", turns.Report(answer="")),
    (0.5, turns.Report(reward=0.5)),
    (1, turns.Report(reward=1.0)),
    (True, turns.Report(reward=1.0)),
    ({}, turns.Report()),
    ({"answer": "x", "reward": 2}, turns.Report("x", 2.0)),
  ],
)
def test_what_a_program_returns_is_its_report(value, report):
  assert programs.report_of(value) == report


@pytest.mark.parametrize(
  "value",
  [
    float("nan"),
    float("inf"),
    [],
    {"answer": 3},
    {"reward": "high"},
    {"reward": float("nan")},
    {"score": 1},
  ],
)
def test_anything_else_is_refused(value):
  with pytest.raises(programs.ProgramError, match="expected None, an answer"):
    programs.report_of(value)


def write(path, text):
  path.write_text(text)
  return path


def test_a_function_is_called_with_the_task(tmp_path):
  path = write(
    tmp_path / "mine.py",
    "def play(task):\n  return f'{task.question} {task.budget}'\n"
    "async def wait(task):\n  return {'reward': 0.5}\n"
    "def fail(task):\n  raise KeyError('no such page')\n",
  )
  one = programs.open_program(f"{path}:play")
  assert play(one) == turns.Report("Who? {'searches': 3}")
  two = programs.open_program(f"{path}:wait")
  assert play(two) == turns.Report(reward=0.5)
  with pytest.raises(programs.ProgramError, match="KeyError: 'no such page'"):
    play(programs.open_program(f"{path}:fail"))


def test_a_command_gets_the_task_and_the_variables_of_openai(tmp_path):
  noted = tmp_path / "noted.json"
  path = write(
    tmp_path / "mine.py",
    "import json, os, sys\n"
    "task = json.load(sys.stdin)\n"
    "names = ['OPENAI_BASE_URL', 'OPENAI_API_KEY', 'OPENAI_MODEL']\n"
    f"open({str(noted)!r}, 'w').write(json.dumps("
    "[task, [os.environ[n] for n in names]]))\n",
  )
  report = play(programs.open_program(f"{sys.executable} {path}"))
  assert report == turns.Report()
  task, variables = json.loads(noted.read_text())
  assert task == TASK.values()
  assert variables == [TASK.base_url, TASK.api_key, TASK.model]


def test_a_command_that_fails_is_quoted_by_its_last_lines(tmp_path):
  path = write(
    tmp_path / "mine.py",
    "import sys\nprint('x' * 3_000_000)\nsys.exit('no tool')\n",
  )
  command = programs.open_program(f"{sys.executable} {path}")
  with pytest.raises(programs.ProgramError, match="(?s)status 1: .*no tool"):
    play(command)


def test_a_command_that_hangs_is_ended_with_its_children(tmp_path):
  child = tmp_path / "child"
  path = write(
    tmp_path / "mine.py",
    "import subprocess, time\n"
    "child = subprocess.Popen(['sleep', '600'])\n"
    f"open({str(child)!r}, 'w').write(str(child.pid))\n"
    "time.sleep(600)\n",
  )
  command = programs.open_program(f"{sys.executable} {path}")
  with pytest.raises(TimeoutError):
    play(command, seconds=3.0)
  pid = int(child.read_text())
  deadline = time.monotonic() + 10
  while time.monotonic() < deadline:
    try:
      state = open(f"/proc/{pid}/stat").read().split()[2]
    except FileNotFoundError:
      return
    if state == "Z":
      return
    time.sleep(0.05)
  pytest.fail(f"process {pid} still runs")


@pytest.mark.parametrize("name", ["no_such_program_here --x", "'open", ""])
def test_a_missing_command_is_refused_at_the_start(name):
  with pytest.raises(ValueError, match="agents.program"):
    programs.open_program(name)


async def _answer(request: requests.Request) -> responses.Response:
  task = await request.json()
  match request.path_params["kind"]:
    case "plays":
      return responses.JSONResponse({"answer": task["question"]})
    case "empty":
      return responses.Response()
    case "broken":
      return responses.Response("no JSON {")
    case "large":
      return responses.Response("x" * 2**21)
  return responses.Response("out of order", 500)


class _Server(uvicorn.Server):
  def install_signal_handlers(self):
    pass


def served(kind, seconds=20.0):
  """Plays the task by a service of this process, at a port of its own."""

  async def run():
    app = applications.Starlette(
      routes=[routing.Route("/{kind}", _answer, methods=["POST"])]
    )
    config = uvicorn.Config(app, port=0, log_level="error", lifespan="off")
    server = _Server(config)
    task = asyncio.ensure_future(server.serve())
    while not server.started:
      await asyncio.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    service = programs.open_program(f"http://127.0.0.1:{port}/{kind}")
    try:
      return await service.play(TASK)
    finally:
      await service.close()
      server.should_exit = True
      await task

  return loop.run(run())


def test_a_service_answers_when_a_task_is_played():
  assert served("plays") == turns.Report("Who?")
  assert served("empty") == turns.Report()


@pytest.mark.parametrize(
  "kind, words",
  [
    ("broken", "no JSON"),
    ("large", "more than 1048576 bytes"),
    ("fails", "status 500: out of order"),
  ],
)
def test_a_service_that_fails_says_how(kind, words):
  with pytest.raises(programs.ProgramError, match=words):
    served(kind)


def test_a_service_that_is_not_there_says_so():
  service = programs.open_program("http://127.0.0.1:9/play")
  with pytest.raises(programs.ProgramError, match="ConnectError"):
    play(service)
