"""Connections that send half a request, or read nothing, over real sockets."""

from __future__ import annotations

import contextlib
import dataclasses
import resource
import socket
import threading
import time

import held_search
import httpx2
import pytest
import test_serve_command
import uvicorn

from retrieval.service import connections, service

ASK = {"queries": ["a"], "topk": 1}
HALF = b"POST /retrieve HTTP/1.1\r\nHost: service\r\nContent-"
# Serves in a process that may open few files.
FEW = """
import resource, sys
sys.path.insert(0, "tests/support")
if sys.argv[2] == "asyncio":
  sys.modules["uvloop"] = None  # As where it is not installed.
import held_search
from launch import serve_retriever
from retrieval.service import connections

few = len(connections.os.listdir("/dev/fd")) + 32 + int(sys.argv[1])
resource.setrlimit(resource.RLIMIT_NOFILE, (few, few))
serve_retriever.serve(held_search.HeldSearch(), port=0)
"""


class Patient(held_search.HeldSearch):
  """Finds a text that is too large for socket buffers."""

  def search(self, queries, k):
    found = super().search(queries, k)
    if queries == ["much"]:
      return [[dataclasses.replace(p, text="x" * 4_000_000) for p in found[0]]]
    return found


@contextlib.contextmanager
def serving(**limits):
  """Runs a server here; yields its address and reasons of early closes."""
  reasons = []
  values = {"most": 4, "headers": 60, "request": 60} | limits
  guard = connections.Guard(**values, on_closed=reasons.append)
  search = Patient()
  app = service.create_app(search)
  search.service = app.state.service
  config = uvicorn.Config(app, http=guard.protocol, ws="none", log_config=None)
  server = uvicorn.Server(config)
  with socket.create_server(("127.0.0.1", 0)) as listening:
    thread = threading.Thread(target=server.run, args=([listening],))
    thread.start()
    try:
      yield listening.getsockname(), reasons, search
    finally:
      search.free.set()
      server.should_exit = True
      thread.join(60)


@contextlib.contextmanager
def half_open(address, count, sent=HALF):
  with contextlib.ExitStack() as stack:
    found = []
    for _ in range(count):
      each = stack.enter_context(socket.create_connection(address, 30))
      each.sendall(sent)
      found.append(each)
    yield found


def ended(connection):
  """Returns whether the server closed the connection; reads the rest."""
  try:
    while connection.recv(1 << 16):
      pass
  except ConnectionError:
    pass
  except TimeoutError:
    return False
  return True


def waits_until(holds, seconds=30):
  """Returns whether `holds()` becomes true in time."""
  end = time.monotonic() + seconds
  while not holds() and time.monotonic() < end:
    time.sleep(0.01)
  return holds()


def ask(address, query="a"):
  url = "http://{}:{}/retrieve".format(*address)
  body = {"queries": [query], "topk": 1}
  return httpx2.post(url, json=body, timeout=60)


@pytest.mark.parametrize("sent", [b"", HALF, b"GET /health"])
def test_a_connection_whose_headers_do_not_end_is_closed(sent):
  with serving(headers=0.2) as (address, reasons, _):
    with half_open(address, 2, sent) as waiting:
      assert all(map(ended, waiting))
    assert reasons == ["headers"] * 2
    assert ask(address).status_code == 200


def test_a_second_request_has_the_same_time_for_its_headers():
  with serving(headers=0.5) as (address, reasons, _):
    first = b"GET /health HTTP/1.1\r\nHost: service\r\n\r\n"
    with half_open(address, 1, first) as (connection,):
      assert connection.recv(1 << 16).startswith(b"HTTP/1.1 200 OK")
      connection.sendall(HALF)
      assert ended(connection)
    assert reasons == ["headers"]


def test_client_that_reads_nothing_is_disconnected():
  with serving(request=0.5) as (address, reasons, _):
    body = b'{"queries": ["much"]}'
    asked = HALF + b"Length: %d\r\n\r\n" % len(body) + body
    with half_open(address, 1, asked) as (connection,):
      assert waits_until(lambda: reasons)
      assert ended(connection)
    assert reasons == ["request"]


def test_further_connection_replaces_the_longest_waiting_one():
  with serving(most=3) as (address, reasons, _):
    with half_open(address, 3) as (first, *others):
      assert ask(address).status_code == 200
      assert ended(first)
      assert reasons == ["replaced"]
      for other in others:
        other.settimeout(0.05)
        assert not ended(other)


def test_server_with_only_busy_connections_refuses_with_503():
  with serving(most=2) as (address, reasons, search):
    search.free.clear()
    threads = [threading.Thread(target=ask, args=(address,)) for _ in range(2)]
    threads[0].start()
    search.wait_for_call()
    threads[1].start()
    # It waits for the search of the first.
    assert waits_until(lambda: search.service.batcher.waiting == 1)
    assert "Every connection of this server is busy" in ask_raw(address)
    search.free.set()
    for thread in threads:
      thread.join(60)
    assert reasons == ["full"]
    assert ask(address).status_code == 200


def ask_raw(address):
  with half_open(address, 1, b"GET /health HTTP/1.1\r\n") as (connection,):
    connection.settimeout(1)
    try:
      return connection.recv(1000).decode()
    except TimeoutError:
      return ""


@pytest.mark.parametrize("loop", ["asyncio", "any"])
def test_150_half_open_connections_do_not_block_other_clients(loop):
  with test_serve_command.started("-c", FEW, 24, loop) as (process, url):
    said = process.stdout.readline()
    assert "at most 24 connections at a time" in said
    address = url.removeprefix("http://").split(":")
    with half_open((address[0], int(address[1])), 150):
      for _ in range(3):
        assert httpx2.post(f"{url}/retrieve", json=ASK).status_code == 200
      metrics = httpx2.get(f"{url}/metrics").text
    assert 'retrieval_closed_connections_total{reason="replaced"}' in metrics
    assert test_serve_command.stopped(process) == 0
    assert "Too many open files" not in process.stderr.read()


def test_a_process_without_room_for_connections_is_refused_with_what_to_do():
  soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
  most, limit = connections.room(10)
  assert most == 10 and limit >= soft
  with test_serve_command.subprocess.Popen(
    [test_serve_command.sys.executable, "-c", FEW, "3", "any"],
    cwd=test_serve_command.ROOT,
    stderr=test_serve_command.subprocess.PIPE,
    text=True,
  ) as process:
    said = process.communicate(timeout=120)[1]
  assert "expected 8 or more. Raise the limit (ulimit -n 4096)." in said
