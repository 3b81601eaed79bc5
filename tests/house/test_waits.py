"""Every wait of the package ends: a network or queue wait has a timeout.

Read off the source. Computing takes the time that it takes and is no wait;
neither is what the kernel does with a local file.
"""

from __future__ import annotations

import ast
import asyncio

import httpx2
import pytest
import source_tree

from anysearch_jax.host import own_loop
from anysearch_jax.rollout.sglang import server as sglang_server
from retrieval.clients import client

# Calls by their last name, whatever they are called on: how many positional
# arguments such a wait has at most before a timeout, and the place of the
# timeout among them, None where it can only be named.
_WAITS = {
  "get": (0, None),  # Of a queue: a mapping's has a key.
  "join": (0, 0),  # Of a thread: a string's has the parts.
  "result": (0, 0),
  "exception": (0, 0),
  "communicate": (1, None),
  "acquire": (0, None),
  "wait_for": (1, 1),
  "as_completed": (1, None),
  "create_connection": (1, 1),
  "urlopen": (2, 2),
  "getresponse": (0, None),
  "recv": (1, None),
  "accept": (0, None),
  "select": (3, 3),
  "run_until_complete": (1, None),
  "wait_until_finished": (0, None),
  "wait_at_barrier": (1, 1),
}
# These by their whole name: others of the last one are no waits.
_NAMED = {
  "subprocess.run": None,
  "subprocess.call": None,
  "subprocess.check_call": None,
  "subprocess.check_output": None,
  "asyncio.wait": None,
  "concurrent.futures.wait": 1,
  "futures.wait": 1,
  "httpx2.Client": None,
  "httpx2.AsyncClient": None,
  "httpx2.get": None,
  "httpx2.post": None,
  "http.client.HTTPConnection": None,
  "opener.open": 2,
  "signal.pause": None,
  "signal.sigwait": None,
  "os.wait": None,
  "os.waitpid": None,
  "input": None,
}
# Awaits of what another task settles, and of many at once.
_AWAITED = ("gather", "wrap_future", "shield")

# The waits without a timeout of their own, each with what ends it.
_ENDED = {
  ("policy/attention/gathered_attention.py", "rows."): "gathers of arrays",
  ("policy/attention/tpu_attention.py", "copy.wait"): "copies on the device",
  (
    "agent/agent.py",
    "concurrent.futures.wait",
  ): "the caller's deadline, or the engine's",
  ("serving/streaming.py", "await working"): (
    "a question has a deadline, and so has the request's connection"
  ),
  ("serving/answers.py", "await asyncio.gather"): "questions have deadlines",
  ("serving/answers.py", "await asking"): "asked only when done",
  ("postgres/retriever.py", "await asyncio.gather"): "Server.run has deadlines",
  (
    "serving/mcp_server.py",
    "await asyncio.shield",
  ): "the agent is loaded or fails",
  (
    "agent/agent.py",
    "future.result()",
  ): "its turns and searches have deadlines",
  ("agent/agent.py", "await asyncio.wrap_future"): "as `future.result`",
  ("agent/background.py", "await asyncio.gather"): "`close` has _PATIENCE",
  ("agent/agent.py", "told.get()"): "the end of its episode ends it",
  ("launch/agents.py", "ends.wait()"): "its context ends",
  ("launch/serve_mcp.py", "agent.result()"): "the agent is loaded or fails",
  ("launch/serve_mcp.py", "loaded.exception()"): "asked only when done",
  ("launch/ask.py", "input("): "the person at the terminal, or the pipe's end",
  ("launch/stopping.py", "listening.recv"): "the other end is closed",
  ("rollout/driver.py", "task.result()"): "the task group has ended",
  (
    "rollout/jax_engine/engine.py",
    "await future",
  ): "`answering.answer` has a deadline",
  (
    "rollout/jax_engine/engine.py",
    "await flight.decoded",
  ): "the device computes it",
  (
    "rollout/jax_engine/turn.py",
    "flight.decoded.exception()",
  ): "called when done",
  (
    "rollout/jax_engine/kv_device.py",
    "calls.get()",
  ): "a thread of nobody's; None ends it",
  ("rollout/searching.py", "await mine"): "`answering.answer` has a deadline",
  ("methods/hiprag.py", "await asyncio.gather"): ("`measuring` has a deadline"),
  ("training/measuring.py", "task.result()"): "the task group has ended",
  ("rollout/toolbox.py", "await asyncio.gather"): (
    "`answering.answer` has a deadline"
  ),
  (
    "rollout/sglang/engine.py",
    "await asyncio.gather",
  ): "each request has a deadline",
  ("rollout/sglang/health.py", "member.looking.acquire()"): (
    "a look's requests have deadlines"
  ),
  ("rollout/sglang/health.py", "task.result()"): "asked only when done",
  ("rollout/sglang/server.py", "future.result()"): "what it runs has deadlines",
  ("rollout/sglang/server.py", "await asyncio.wrap_future"): (
    "`Fleet.ask` has deadlines"
  ),
  ("rollout/sglang/server.py", "httpx2.Timeout"): (
    "`asyncio.timeout` around all tries; see `Server._ask` and `generate`"
  ),
  ("rollout/sglang/server.py", "asyncio.wait(tasks)"): (
    "whoever waits for it does so for _ABORT_SECONDS"
  ),
  ("rollout/sglang/weights.py", "await asyncio.gather"): (
    "each request has a deadline"
  ),
  ("policy/tensor_files.py", "writing.result()"): "a local file",
  ("policy/tensor_files.py", "running.result()"): "a local file",
  ("training/checkpoint.py", "self._manager.wait_until_finished()"): (
    "files; Orbax has its own timeout for other processes"
  ),
  ("training/pipeline.py", "self._jobs.get()"): "a thread of nobody's; None",
  ("training/sampler.py", "await playing"): "turns and searches have deadlines",
  ("retrieval/service/batching.py", "done.result()"): "called when done",
  ("host/http/calls.py", "httpx2.Timeout"): "`timeout_at` around all tries",
  ("host/own_loop.py", "await asyncio.wrap_future"): "clients have deadlines",
  ("host/own_loop.py", "self._submit(coroutine).result()"): (
    "clients have deadlines"
  ),
  ("retrieval/web_pages/pages.py", "await asyncio.gather"): (
    "each page has a deadline"
  ),
  ("retrieval/mcp_tools/tool.py", "await asyncio.gather"): (
    "each call has a deadline"
  ),
  ("retrieval/mcp_tools/tool.py", "await asyncio.shield"): (
    "the server has `start` seconds"
  ),
  ("retrieval/mcp_tools/tool.py", "self._ready.exception()"): (
    "called when done"
  ),
  (
    "retrieval/clients/client.py",
    "await asyncio.gather",
  ): "`Caller.ask` has one",
  ("retrieval/service/service.py", "found.result()"): "asked only when done",
  ("retrieval/index/row_scan.py", "other.result()"): "its items are bounded",
  ("retrieval/clients/web.py", "await asyncio.gather"): "`Caller.ask` has one",
  ("retrieval/pipeline/served.py", "await asyncio.gather"): (
    "`Caller.ask` has one"
  ),
  ("retrieval/pipeline/pipeline.py", "await asyncio.gather"): (
    "each stage has a deadline"
  ),
  ("retrieval/pipeline/searching.py", "asyncio.run_coroutine_threadsafe"): (
    "each stage has a deadline"
  ),
  ("retrieval/clients/sharded.py", "await asyncio.gather"): (
    "`Caller.ask` has one"
  ),
}


def _name(call: ast.Call) -> str:
  return ast.unparse(call.func)


def _has_timeout(call: ast.Call, at: int | None) -> bool:
  """Returns whether a call has a timeout, by name or by position."""
  given = [k.value for k in call.keywords if k.arg and "timeout" in k.arg]
  if at is not None and len(call.args) > at:
    given.append(call.args[at])
  return not all(map(_is_none, given))


def _is_bounded(around) -> bool:
  """Returns whether a node is in `async with asyncio.timeout(...)`."""
  for node in reversed(around):
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
      return False
    if isinstance(node, ast.AsyncWith) and any(
      ast.unparse(item.context_expr).startswith("asyncio.timeout")
      for item in node.items
    ):
      return True
  return False


def _is_endless(node: ast.AST, around) -> bool:
  if isinstance(node, ast.Await):
    value = node.value
    if isinstance(value, ast.Call):
      last = _name(value).rpartition(".")[2]
      return last in _AWAITED and not _is_bounded(around)
    return not _is_bounded(around)
  if not isinstance(node, ast.Call):
    return False
  name, last = _name(node), _name(node).rpartition(".")[2]
  if _is_bounded(around):
    return False
  if name in _NAMED:
    return not _has_timeout(node, _NAMED[name])
  if name.endswith("flock"):
    return "LOCK_NB" not in ast.unparse(node)
  if name == "httpx2.Timeout":
    return any(
      isinstance(a, ast.Constant) and a.value is None for a in node.args
    )
  nothing = len(node.args) == 1 and _is_none(node.args[0])
  if last == "wait":
    return (nothing or not node.args) and not _has_timeout(node, None)
  if last not in _WAITS or "." not in name:
    return False
  most, at = _WAITS[last]
  few = len(node.args) <= most or (at == 0 and nothing)
  return few and not _has_timeout(node, at)


def _is_none(node: ast.AST) -> bool:
  return isinstance(node, ast.Constant) and node.value is None


def endless(places) -> list[source_tree.Place]:
  """Returns the waits without a timeout among nodes."""
  return [p for p, node, around in places if _is_endless(node, around)]


def _entry(place: source_tree.Place) -> tuple[str, str] | None:
  """Returns the entry of `_ENDED` for a wait."""
  return next(
    (
      (file, text)
      for file, text in _ENDED
      if place.file.endswith(f"/{file}") or place.file == file
      if place.text.startswith(text)
    ),
    None,
  )


@pytest.fixture(scope="module")
def found():
  return endless(source_tree.all_nodes())


def test_every_wait_has_a_timeout_or_a_reason(found):
  unknown = [str(place) for place in found if _entry(place) is None]
  assert not unknown, "give it a timeout, or say in _ENDED what ends it"


def test_every_listed_wait_exists(found):
  assert {_entry(place) for place in found} >= set(_ENDED)


@pytest.mark.parametrize(
  "line",
  [
    "jobs.get()",
    "jobs.get(block=True)",
    "jobs.get(timeout=None)",
    "thread.join()",
    "thread.join(None)",
    "event.wait(None)",
    "future.result()",
    "event.wait()",
    "process.wait()",
    "process.communicate(b'x')",
    "lock.acquire()",
    "condition.wait_for(lambda: done)",
    "subprocess.run(['ls'])",
    "subprocess.check_output(['ls'], text=True)",
    "urllib.request.urlopen(url)",
    "opener.open(url)",
    "socket.create_connection(address)",
    "httpx2.AsyncClient(headers=headers)",
    "httpx2.Client(timeout=None)",
    "httpx2.Timeout(None, connect=1)",
    "concurrent.futures.as_completed(futures)",
    "concurrent.futures.wait(futures)",
    "fcntl.flock(file, fcntl.LOCK_EX)",
    "input()",
  ],
)
def test_endless_wait_is_found(line):
  assert endless(source_tree.nodes(f"def f():\n  x = {line}"))


@pytest.mark.parametrize(
  "line",
  [
    "await future",
    "await self.answered",
    "await asyncio.gather(a(), b())",
    "await asyncio.wait(tasks)",
    "await asyncio.wrap_future(f)",
  ],
)
def test_endless_await_is_found(line):
  plain = f"async def f():\n  {line}"
  assert endless(source_tree.nodes(plain))
  bounded = f"async def f():\n  async with asyncio.timeout(1):\n    {line}"
  assert not endless(source_tree.nodes(bounded))
  # A function that is made there runs who knows where.
  inner = f"    async def g():\n      {line}"
  made = f"async def f():\n  async with asyncio.timeout(1):\n{inner}"
  assert endless(source_tree.nodes(made))


@pytest.mark.parametrize(
  "line",
  [
    "values.get(key)",
    "', '.join(names)",
    "jobs.get(timeout=1)",
    "thread.join(5)",
    "future.result(deadline)",
    "event.wait(1)",
    "process.wait(timeout=1)",
    "subprocess.run(['ls'], timeout=5)",
    "urllib.request.urlopen(url, timeout=5)",
    "socket.create_connection(address, 1)",
    "httpx2.AsyncClient(timeout=httpx2.Timeout(5))",
    "fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)",
    "shared.wait(make())",
  ],
)
def test_bounded_wait_is_not_reported(line):
  assert not endless(source_tree.nodes(f"def f():\n  x = {line}"))


# Waits that had no end.


@pytest.fixture
def hangs():
  """Returns a function that hangs for 30 s, and a list of its completions."""
  ended = []

  async def hang(*_):
    await asyncio.sleep(30)
    ended.append(1)

  return hang, ended


def test_a_client_that_does_not_close_is_left_behind(monkeypatch, hangs):
  hang, ended = hangs
  monkeypatch.setattr(own_loop, "_CLOSE_SECONDS", 0.1)
  monkeypatch.setattr(httpx2.AsyncClient, "aclose", hang)
  retriever = client.HttpRetriever("http://127.0.0.1:9")
  retriever.close()
  assert not ended


def test_servers_that_do_not_close_are_left_behind(monkeypatch, hangs):
  hang, ended = hangs
  monkeypatch.setattr(sglang_server, "_ABORT_SECONDS", 0.1)
  background = sglang_server.Background()
  background.close(hang)
  assert not ended
