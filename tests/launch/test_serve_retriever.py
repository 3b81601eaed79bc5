"""The command that serves an index: clients, stops, and odd connections."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import resource
import signal
import socket
import subprocess
import threading
import urllib.error
import urllib.request

import commands
import foreign_pages
import held_search
import httpx2
import pytest
import served
import source_tree
import waits

from anysearch_jax.host import http_server
from anysearch_jax.launch import serve_retriever
from anysearch_jax.retrieval.index import building, opening
from anysearch_jax.retrieval.service import service

# Serves a search that takes a few seconds.
SLOW = """
import sys, time
sys.path.insert(0, "tests/support")
import held_search
from anysearch_jax.launch import serve_retriever

class Slow(held_search.HeldSearch):
  def search(self, queries, k):
    time.sleep(float(sys.argv[1]))
    return super().search(queries, k)

serve_retriever.serve(Slow(), port=0, grace=float(sys.argv[2]))
"""
CITIES = ["Lima", "Quito", "Bogota", "Caracas"]


@pytest.fixture(scope="module")
def index(tmp_path_factory):
  """Makes a small BM25 index."""
  folder = tmp_path_factory.mktemp("served")
  corpus = folder / "corpus.jsonl"
  lines = [
    {"id": f"{i}", "contents": f'"{city}"\n{city} is a capital.\nIt is large.'}
    for i, city in enumerate(CITIES)
  ]
  corpus.write_text("".join(json.dumps(line) + "\n" for line in lines))
  building.build(corpus, folder / "index", building.Settings("bm25"))
  return folder / "index"


@contextlib.contextmanager
def started(*command):
  """Yields a listening server's process and URL; kills it at the end."""
  process = source_tree.started(*command, stderr=subprocess.PIPE)
  try:
    line = process.stdout.readline()
    assert line.startswith("serving "), process.communicate()
    yield process, line.split()[-1]
  finally:
    if process.poll() is None:
      process.kill()
    process.communicate()


def stopped(process, seconds=120):
  """Stops a server by SIGTERM; returns its exit code."""
  process.send_signal(signal.SIGTERM)
  return process.wait(seconds)


def batch_search(search_url, queries, topk):
  """Asks and reads as Search-R1's client does (`llm_agent/generation.py`)."""
  payload = {"queries": queries, "topk": topk, "return_scores": True}
  found = []
  for result in httpx2.post(search_url, json=payload).json()["result"]:
    format_reference = ""
    for idx, doc_item in enumerate(result):
      content = doc_item["document"]["contents"]
      title = content.split("\n")[0]
      text = "\n".join(content.split("\n")[1:])
      format_reference += f"Doc {idx + 1}(Title: {title}) {text}\n"
    found.append(format_reference)
  return found


async def ask_often(url, number):
  """A client of 64, which must get its own answers."""
  async with httpx2.AsyncClient(timeout=60) as client:
    for turn in range(3):
      city = CITIES[(number + turn) % len(CITIES)]
      body = {"queries": [city, f"{city} large"], "topk": 1 + number % 3}
      response = await client.post(f"{url}/retrieve", json=body)
      assert response.status_code == 200, response.text
      for some in response.json()["result"]:
        assert some[0]["title"] == city and len(some) <= 1 + number % 3


async def main(url):
  await asyncio.gather(*(ask_often(url, number) for number in range(64)))


def test_search_r1s_client_and_64_at_once_search_a_real_index(index):
  command = (
    "-m",
    "anysearch_jax.launch.serve_retriever",
    f"--index={index}",
    "--port=0",
  )
  with started(*command) as (process, url):
    # What a policy writes must not cost its batch the answers.
    long = "Lima " * 5000
    queries = ["where is Quito?", "Lima", "no word", " ", "", long]
    quito, lima = (
      f'Doc 1(Title: "{city}") {city} is a capital.\nIt is large.\n'
      for city in ("Quito", "Lima")
    )
    found = batch_search(f"{url}/retrieve", queries, 1)
    assert found == [quito, lima, "", "", "", lima]
    health = httpx2.get(f"{url}/health").json()
    assert health["passages"] == len(CITIES)
    described = {"backend": "bm25", "model": "", "index_metric": "bm25"}
    assert described.items() <= health.items()
    assert health["index_size"] == health["corpus_size"] == len(CITIES)
    assert health["identity"] == opening.open_index(index).identity
    asyncio.run(main(url))
    lines = httpx2.get(f"{url}/metrics").text.splitlines()
    answered = 'retrieval_requests_total{status="200"}'
    assert f"{answered} {64 * 3 + 1}.0" in lines
    assert not any("status=" in line and '"200"' not in line for line in lines)
    foreign_pages.check(url, "/retrieve")
    assert stopped(process) == 0


@pytest.mark.parametrize(
  ("host", "names", "asked", "admitted"),
  [
    ("0.0.0.0", (), "10.0.0.7:8000", True),
    ("0.0.0.0", (), "gpu-17:8000", True),
    ("node.example", (), "Node.Example:80", True),
    ("0.0.0.0", (), "gpu-17.example:8000", False),
    ("0.0.0.0", ("x", "GPU-17.example."), "gpu-17.example", True),
    ("127.0.0.1", ("search.example",), "search.example:443", True),
  ],
)
def test_name_of_a_service_without_a_token(host, names, asked, admitted):
  app = http_server.OwnPages(service.create_app(Patient()), host, names)

  async def status(asked, page):
    headers = {"host": asked, "origin": f"https://{page}"}
    async with served.client_of(app, headers=headers) as client:
      return (await client.post("/retrieve", json=ASK)).status_code

  assert asyncio.run(status(asked, asked)) == (200 if admitted else 421)
  expected = 200 if "search.example" in names else 403
  assert asyncio.run(status("127.0.0.1", "search.example")) == expected


def test_the_token_comes_from_the_environment(index, monkeypatch):
  apps = []
  monkeypatch.setattr(
    http_server, "serve", lambda app, *_, **__: apps.append(app)
  )
  monkeypatch.setenv("SERVED_TOKEN", "secret\n")
  flags = (f"--index={index}", "--token_variable=SERVED_TOKEN")
  assert commands.run(serve_retriever, *flags) == ""

  async def asked(headers):
    async with served.client_of(apps[0], headers=headers) as client:
      return await client.post("/retrieve", json={"queries": ["Lima"]})

  assert asyncio.run(asked({})).status_code == 401
  response = asyncio.run(asked({"authorization": "Bearer secret"}))
  assert response.json()["result"][0][0]["title"] == "Lima"


async def ask_and_stop(process, url, count):
  """Sends SIGTERM while requests are open; returns responses and exit code.

  New clients find no server.
  """
  async with httpx2.AsyncClient(timeout=60) as client:
    body = {"queries": ["a"], "topk": 1}
    asked = [
      asyncio.create_task(client.post(f"{url}/retrieve", json=body))
      for _ in range(count)
    ]
    # Sent, and read: the server says how many queries it has.
    async with httpx2.AsyncClient(timeout=60) as watcher:
      while f"retrieval_queries_total {count}.0" not in (
        (await watcher.get(f"{url}/metrics")).text
      ):
        await asyncio.sleep(0.01)
      process.send_signal(signal.SIGTERM)
      with pytest.raises(httpx2.TransportError):
        while await asyncio.to_thread(httpx2.get, f"{url}/health"):
          await asyncio.sleep(0.01)
    responses = await asyncio.gather(*asked)
  code = await asyncio.to_thread(process.wait, 60)
  return responses, code


def test_stopped_server_answers_open_requests():
  with started("-c", SLOW, 1.5, 60) as (process, url):
    responses, code = asyncio.run(ask_and_stop(process, url, 8))
    assert [response.status_code for response in responses] == [200] * 8
    assert responses[0].json()["result"][0][0]["text"] == "about a"
    assert code == 0
    with pytest.raises(httpx2.ConnectError):
      httpx2.get(f"{url}/health")


def test_a_search_beyond_the_grace_is_cut_off():
  with started("-c", SLOW, 120, 0.6) as (process, url):
    responses, code = asyncio.run(ask_and_stop(process, url, 3))
    for response in responses:
      assert response.status_code == 503
      assert "stopped before" in response.json()["detail"]
    # The search itself takes 120 seconds, the wait for the process 60.
    assert code == 0


@pytest.mark.parametrize(
  ("flags", "sentence"),
  [
    (["--queue=1"], "--queue: found 1, expected queries (4096) or more"),
    (["--token_variable=NOT_SET"], "NOT_SET is not set"),
    (["--token_variable=sk-1234"], "expected the name of an environment"),
    (["--index=not_there"], "found no finished index"),
    (["--port={taken}"], "name another --port"),
    (["--hosts=http://a.example"], "--hosts: found 'http://a.example'"),
  ],
)
def test_invalid_server_is_refused(index, flags, sentence):
  with socket.create_server(("127.0.0.1", 0)) as taken:
    port = taken.getsockname()[1]
    asked = [flag.format(taken=port) for flag in flags]
    said = commands.run(serve_retriever, f"--index={index}", *asked)
  assert sentence in said
  assert "sk-1234" not in said


# Connections that send half a request, or read nothing.

ASK = {"queries": ["a"], "topk": 1}
HALF = b"POST /retrieve HTTP/1.1\r\nHost: service\r\nContent-"
# Serves in a process that may open few files.
FEW = """
import os, resource, sys
sys.path.insert(0, "tests/support")
if sys.argv[2] == "asyncio":
  sys.modules["uvloop"] = None  # As where it is not installed.
import held_search
from anysearch_jax.launch import serve_retriever

few = len(os.listdir("/dev/fd")) + 32 + int(sys.argv[1])
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
  values = {"max_connections": 4, "headers": 60, "request": 60} | limits
  guard = http_server.Guard(**values, on_closed=reasons.append)
  search = Patient()
  app = service.create_app(search)
  search.service = app.state.service
  with served.listening(app, http=guard.protocol) as address:
    try:
      yield address, reasons, search
    finally:
      search.free.set()


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
      waits.wait_for(lambda: reasons)
      assert ended(connection)
    assert reasons == ["request"]


def test_server_with_only_busy_connections_refuses_with_503():
  with serving(max_connections=2) as (address, reasons, search):
    search.free.clear()
    threads = [threading.Thread(target=ask, args=(address,)) for _ in range(2)]
    threads[0].start()
    search.wait_for_call()
    threads[1].start()
    # It waits for the search of the first.
    waits.wait_for(lambda: search.service.batcher.waiting == 1)
    assert "Every connection of this server is busy" in ask_raw(address)
    search.free.set()
    for thread in threads:
      thread.join(60)
    assert reasons == ["full"]
    assert ask(address).status_code == 200


def test_client_that_sends_a_large_body_before_it_reads_gets_its_413():
  with serving() as (address, reasons, _):
    url = "http://{}:{}/retrieve".format(*address)
    for _ in range(3):
      with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(url, bytes(50 << 20), timeout=60)
      assert refused.value.code == 413
      assert "more than 16777216 bytes" in refused.value.read().decode()
    assert not reasons


def test_client_that_waits_before_a_large_body_is_refused_and_closed():
  """It might send another request instead of the body."""
  head = HALF + b"Length: 50000000\r\nExpect: 100-continue\r\n\r\n"
  with serving() as (address, reasons, _):
    with half_open(address, 1, head) as (connection,):
      said = connection.makefile("rb").read()
    assert said.startswith(b"HTTP/1.1 413 ") and b"connection: close" in said
    assert not reasons


def test_body_that_does_not_end_after_its_answer_is_closed():
  head = b"POST /nothing HTTP/1.1\r\nHost: service\r\nContent-Length: 9\r\n\r\n"
  with serving(request=0.5) as (address, reasons, _):
    with half_open(address, 1, head) as (connection,):
      assert connection.recv(1 << 16).startswith(b"HTTP/1.1 404 ")
      connection.sendall(b"x")
      assert ended(connection)
    assert reasons == ["request"]


def ask_raw(address):
  with half_open(address, 1, b"GET /health HTTP/1.1\r\n") as (connection,):
    connection.settimeout(1)
    try:
      return connection.recv(1000).decode()
    except TimeoutError:
      return ""


@pytest.mark.parametrize(
  "loop", ["any", pytest.param("asyncio", marks=pytest.mark.slow)]
)
def test_150_half_open_connections_do_not_block_other_clients(loop):
  with started("-c", FEW, 24, loop) as (process, url):
    said = process.stdout.readline()
    assert "at most 24 connections at a time" in said
    address = url.removeprefix("http://").split(":")
    with half_open((address[0], int(address[1])), 150):
      for _ in range(3):
        assert httpx2.post(f"{url}/retrieve", json=ASK).status_code == 200
      metrics = httpx2.get(f"{url}/metrics").text
    assert 'retrieval_closed_connections_total{reason="replaced"}' in metrics
    assert stopped(process) == 0
    assert "Too many open files" not in process.stderr.read()


def test_a_process_without_room_for_connections_is_refused_with_what_to_do():
  soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
  connections, limit = http_server.connection_limit(10)
  assert connections == 10 and limit >= soft
  said = source_tree.python("-c", FEW, "3", "any").stderr
  assert "expected 8 or more. Raise the limit (ulimit -n 4096)." in said
