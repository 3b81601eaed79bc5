"""The programs that play episodes: a function, a command or a service.

Each gets a `Task` and plays it against the session's endpoint. What it returns
may be its answer or its reward; a program that returns nothing reports by
`POST OUTCOME_URL`, or its last message is the answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import inspect
import json
import os
import pathlib
import shlex
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import httpx2

from anysearch_jax.host import parent_bound, plugins
from anysearch_jax.sessions import turns

_SETTING = "agents.program"
# Bytes of a command's output that are kept for messages, and of a service's
# answer that are read.
_KEPT_BYTES = 4096
_LONGEST_ANSWER = 2**20
_READ_BYTES = 65536
_END_SECONDS = 5.0  # For a command that is told to end.
_QUOTED_CHARACTERS = 300


class ProgramError(Exception):
  """A program failed; the message says how."""


@dataclasses.dataclass(frozen=True)
class Task:
  """What a program gets to play an episode.

  Attributes:
    base_url: address of the session's OpenAI endpoint, with `/v1`.
    api_key: its key.
    model: name of the model.
    outcome_url: address that takes `{"answer": ..., "reward": ...}`.
    question_id: names the question.
    question: the question.
    corpus: name of the corpus that answers it; "" if there is only one.
    budget: the assigned caps by unit: `searches`, `tokens`, `dollars`,
      `seconds`.
    scaffold: whether it is an episode of Phase I, in which the paper states
      the remaining budget before each turn.
  """

  base_url: str
  api_key: str
  model: str
  outcome_url: str
  question_id: str
  question: str
  corpus: str
  budget: Mapping[str, float]
  scaffold: bool

  def values(self) -> dict[str, Any]:
    """Returns the task as JSON values."""
    return {**dataclasses.asdict(self), "budget": dict(self.budget)}

  def variables(self) -> dict[str, str]:
    """Returns the environment variables that OpenAI's clients read."""
    return {
      "OPENAI_BASE_URL": self.base_url,
      "OPENAI_API_KEY": self.api_key,
      "OPENAI_MODEL": self.model,
    }


class Program(Protocol):
  """Plays tasks."""

  async def play(self, task: Task) -> turns.Report:
    """Plays a task to its end; a cancelled program is ended.

    Raises:
      ProgramError: the program failed.
    """

  async def close(self) -> None:
    """Ends what still runs."""


def open_program(name: str) -> Program:
  """Returns a program by its name, see `config.AgentsConfig.program`.

  Raises:
    ValueError: there is no such command or function.
  """
  if name.startswith(("http://", "https://")):
    return Service(name)
  if plugins.is_name(name) and not any(map(str.isspace, name)):
    loaded = plugins.load(name, setting=_SETTING, expected="a function (task)")
    return Function(loaded.value)
  return Command(name)


def report_of(value: Any) -> turns.Report:
  """Returns what a program returned as a report.

  Args:
    value: None, an answer, a reward, or a mapping with `answer` and `reward`.

  Raises:
    ProgramError: it is something else.
  """
  match value:
    case None:
      return turns.Report()
    case str():
      return turns.Report(answer=value)
    case bool():
      return turns.Report(reward=float(value))
    case int() | float() if abs(value) <= turns.LARGEST_REWARD:
      return turns.Report(reward=float(value))
    case Mapping() if {*value} <= {"answer", "reward"}:
      answer = report_of(value.get("answer")).answer
      reward = report_of(value.get("reward")).reward
      if (answer, reward) == (value.get("answer"), value.get("reward")):
        return turns.Report(answer, reward)
  raise ProgramError(
    f"it returned {str(value)[:_QUOTED_CHARACTERS]!r}, expected None, an "
    "answer as text, a finite reward, or a mapping of `answer` and `reward`"
  )


@functools.cache
def _programs_loop() -> asyncio.AbstractEventLoop:
  """Returns the event loop of coroutine functions, in a thread of its own.

  A process has one, because the clients that a function keeps belong to it.
  """
  loop = asyncio.new_event_loop()
  thread = threading.Thread(
    target=loop.run_forever, name="programs", daemon=True
  )
  thread.start()
  return loop


class Function:
  """A function of the user's, called in threads of its own.

  A coroutine function runs in an event loop of its own, so that nothing that it
  does holds up the run's. Threads are daemons: a function that hangs holds up
  no end of the process.

  Args:
    function: called with the task.
  """

  def __init__(self, function: Callable[[Task], Any]):
    self._function = function
    self._loop: asyncio.AbstractEventLoop | None = None
    if inspect.iscoroutinefunction(function):
      self._loop = _programs_loop()
      self._loop.set_exception_handler(None)

  async def play(self, task: Task) -> turns.Report:
    running = asyncio.get_running_loop()
    if self._loop is None:
      future = running.create_future()
      thread = threading.Thread(
        target=self._call,
        args=(task, running, future),
        name="program",
        daemon=True,
      )
      thread.start()
      value, error = await future
    else:
      value, error = await asyncio.wrap_future(
        asyncio.run_coroutine_threadsafe(self._awaited(task), self._loop)
      )
    if error:
      raise ProgramError(error)
    return report_of(value)

  def _call(
    self,
    task: Task,
    caller_loop: asyncio.AbstractEventLoop,
    future: asyncio.Future[tuple[Any, str]],
  ) -> None:
    """Calls the function, and hands over its value, or its error as text."""
    try:
      outcome = (self._function(task), "")
    except BaseException as error:  # The user's code may raise anything.
      outcome = (None, _sentence(error))

    def set_result() -> None:
      if not future.done():
        future.set_result(outcome)

    with contextlib.suppress(RuntimeError):  # The loop has ended.
      caller_loop.call_soon_threadsafe(set_result)

  async def _awaited(self, task: Task) -> tuple[Any, str]:
    """Awaits the function; returns its value, or its error as text."""
    current_task = asyncio.current_task()
    assert current_task is not None
    try:
      return await self._function(task), ""
    except BaseException as error:
      # It was cancelled from outside: the episode has ended.
      if isinstance(error, asyncio.CancelledError) and (
        current_task.cancelling()
      ):
        raise
      return None, _sentence(error)

  async def close(self) -> None:
    if self._loop is not None:
      # Clients that a program left open would complain at the end.
      self._loop.set_exception_handler(lambda loop, context: None)


def _sentence(error: BaseException) -> str:
  """Returns an error of the user's code as text."""
  return f"{type(error).__name__}: {str(error)[:_QUOTED_CHARACTERS]}"


class Service:
  """A service that plays the tasks which are posted to its address.

  It answers when a task is played, with `{}` or its report.
  """

  def __init__(self, url: str):
    self._url = url
    # The session's deadline bounds the waiting.
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=64)
    self._client = httpx2.AsyncClient(timeout=None, limits=limits)

  async def play(self, task: Task) -> turns.Report:
    try:
      async with self._client.stream(
        "POST", self._url, json=task.values()
      ) as response:
        body = bytearray()
        async for part in response.aiter_bytes():
          body += part
          if len(body) > _LONGEST_ANSWER:
            raise ProgramError(
              f"it answered with more than {_LONGEST_ANSWER} bytes"
            )
      if response.status_code != 200:
        quoted = bytes(body[:_QUOTED_CHARACTERS]).decode(errors="replace")
        raise ProgramError(
          f"it answered with status {response.status_code}: {quoted}"
        )
      return report_of(json.loads(body or b"{}"))
    except (httpx2.HTTPError, httpx2.InvalidURL) as error:
      raise ProgramError(f"{type(error).__name__}: {error}") from error
    except (ValueError, RecursionError) as error:
      raise ProgramError(f"its answer is no JSON ({error})") from error

  async def close(self) -> None:
    await self._client.aclose()


class Command:
  """A command that plays one task and ends; a process for each task.

  It gets the task as JSON on its input, and OpenAI's environment variables.

  Raises:
    ValueError: there is no such program.
  """

  def __init__(self, command: str):
    try:
      self._arguments = shlex.split(command)
    except ValueError as error:
      raise ValueError(
        f"{_SETTING}: found {command!r}, expected a command ({error})."
      ) from error
    program = shutil.which(self._arguments[0]) if self._arguments else None
    if program is None:
      raise ValueError(
        f"{_SETTING}: found no program {command!r}; expected a command, an "
        "address such as http://127.0.0.1:9000/play, or file.py:NAME."
      )
    self._arguments[0] = program

  async def play(self, task: Task) -> turns.Report:
    bound = pathlib.Path(parent_bound.__file__)
    command = [sys.executable, "-I", str(bound), str(os.getpid())]
    try:
      process = await asyncio.create_subprocess_exec(
        *command,
        *self._arguments,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env=os.environ | task.variables(),
        start_new_session=True,
      )
    except OSError as error:
      raise ProgramError(f"it could not be started ({error})") from error
    assert process.stdin is not None and process.stdout is not None
    output = b""
    reading = asyncio.ensure_future(_last_bytes(process.stdout))
    try:
      with contextlib.suppress(ConnectionError):  # It need not read its input.
        process.stdin.write(json.dumps(task.values()).encode())
        await process.stdin.drain()
      process.stdin.close()
      status = await process.wait()
    finally:
      # Also the processes that it started, which may hold its output open.
      with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
      await asyncio.wait([reading], timeout=_END_SECONDS)
      if reading.done() and not reading.cancelled():
        output = reading.result()
      reading.cancel()
      # A child in a session of its own may still hold the pipe.
      process._transport.close()  # type: ignore[attr-defined]
    if status != 0:
      text = output.decode(errors="replace").strip()[-_QUOTED_CHARACTERS:]
      raise ProgramError(f"it ended with status {status}: {text}")
    return turns.Report()

  async def close(self) -> None:
    pass


async def _last_bytes(stream: asyncio.StreamReader) -> bytes:
  """Reads a stream to its end and returns its last bytes."""
  end = b""
  while not stream.at_eof():
    end = (end + await stream.read(_READ_BYTES))[-_KEPT_BYTES:]
  return end
