"""The command that serves an index, run as a process."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys

import httpx2
import pytest

from retrieval.index import building, opening

ROOT = pathlib.Path(__file__).resolve().parents[2]
# Serves a search that takes a few seconds.
SLOW = """
import sys, time
sys.path.insert(0, "tests/support")
import held_search
from launch import serve_retriever

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
def started(*command, env=None):
  """Yields a listening server's process and URL; kills it at the end."""
  process = subprocess.Popen(
    [sys.executable, *map(str, command)],
    cwd=ROOT,
    env=os.environ | (env or {}),
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
  )
  try:
    line = process.stdout.readline()
    assert line.startswith("serving "), process.communicate()
    yield process, line.split()[-1]
  finally:
    if process.poll() is None:
      process.kill()
    process.communicate()


def served(index, *flags, env=None):
  command = ("-m", "launch.serve_retriever", f"--index={index}", "--port=0")
  return started(*command, *flags, env=env)


def stopped(process, seconds=120):
  """Stops a server by SIGTERM; returns its exit code."""
  process.send_signal(signal.SIGTERM)
  return process.wait(seconds)


class SearchR1Client:
  """Search-R1's client code (`llm_agent/generation.py`)."""

  def __init__(self, search_url, topk):
    self.search_url, self.topk = search_url, topk

  def batch_search(self, queries):
    payload = {"queries": queries, "topk": self.topk, "return_scores": True}
    results = httpx2.post(self.search_url, json=payload).json()["result"]
    return [self._passages2string(result) for result in results]

  def _passages2string(self, retrieval_result):
    format_reference = ""
    for idx, doc_item in enumerate(retrieval_result):
      content = doc_item["document"]["contents"]
      title = content.split("\n")[0]
      text = "\n".join(content.split("\n")[1:])
      format_reference += f"Doc {idx + 1}(Title: {title}) {text}\n"
    return format_reference


def zero_search_client(url, query, topk):
  """Asks a server like ZeroSearch (`retrieve_from_wiki`)."""
  payload = {"query": query, "top_k": topk}
  response = httpx2.post(f"{url}/retrieve", json=payload)
  return "\n".join(
    [f"Doc {i + 1}: {doc['text']}" for i, doc in enumerate(response.json())]
  )


def re_search_client(url, query, top_n):
  """Asks a server like ReSearch (`vLLMRolloutWithSearch`)."""
  data = {"query": query, "top_n": top_n}
  response = httpx2.post(f"{url}/batch_search", json=data)
  result_list = []
  for item in response.json():
    curr_result = ""
    for line in item:
      curr_result += f"{line['contents']}\n\n"
    result_list.append(curr_result.strip())
  return result_list


def test_clients_of_other_projects_search_a_real_index(index):
  with served(index) as (process, url):
    client = SearchR1Client(f"{url}/retrieve", 1)
    # What a policy writes must not cost its batch the answers.
    long = "Lima " * 5000
    queries = ["where is Quito?", "Lima", "no word", " ", "", long]
    quito, lima = (
      f'Doc 1(Title: "{city}") {city} is a capital.\nIt is large.\n'
      for city in ("Quito", "Lima")
    )
    assert client.batch_search(queries) == [quito, lima, "", "", "", lima]
    assert zero_search_client(url, "Bogota", 1) == (
      "Doc 1: Bogota is a capital.\nIt is large."
    )
    contents = [f'"{c}"\n{c} is a capital.\nIt is large.' for c in CITIES]
    assert re_search_client(url, ["Lima", "Caracas"], 1) == [
      contents[0],
      contents[3],
    ]
    health = httpx2.get(f"{url}/health").json()
    assert health["passages"] == len(CITIES)
    described = {"backend": "bm25", "model": "", "index_metric": "bm25"}
    assert described.items() <= health.items()
    assert health["index_size"] == health["corpus_size"] == len(CITIES)
    assert health["identity"] == opening.open_index(index).identity
    assert stopped(process) == 0


def test_64_clients_at_once_get_their_own_answers(index):
  async def client_of(url, number):
    async with httpx2.AsyncClient(timeout=60) as client:
      for turn in range(12):
        city = CITIES[(number + turn) % len(CITIES)]
        body = {"queries": [city, f"{city} large"], "topk": 1 + number % 3}
        response = await client.post(f"{url}/retrieve", json=body)
        assert response.status_code == 200, response.text
        for some in response.json()["result"]:
          assert some[0]["title"] == city and len(some) <= 1 + number % 3

  async def main(url):
    await asyncio.gather(*(client_of(url, number) for number in range(64)))

  with served(index) as (process, url):
    asyncio.run(main(url))
    lines = httpx2.get(f"{url}/metrics").text.splitlines()
    assert (
      f'retrieval_requests_total{{route="/retrieve",status="200"}} {64 * 12}.0'
      in lines
    )
    assert not any("status=" in line and '"200"' not in line for line in lines)
    assert stopped(process) == 0


def test_the_token_comes_from_the_environment(index):
  flags = ("--token_variable=SERVED_TOKEN",)
  with served(index, *flags, env={"SERVED_TOKEN": "secret\n"}) as (_, url):
    body = {"queries": ["Lima"]}
    assert httpx2.post(f"{url}/retrieve", json=body).status_code == 401
    right = {"authorization": "Bearer secret"}
    response = httpx2.post(f"{url}/retrieve", json=body, headers=right)
    assert response.json()["result"][0][0]["title"] == "Lima"
    assert httpx2.get(f"{url}/health").status_code == 200


async def ask_and_stop(process, url, count):
  """Sends SIGTERM while requests are open; returns responses and exit code."""
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
  with started("-c", SLOW, 120, 0.3) as (process, url):
    responses, code = asyncio.run(ask_and_stop(process, url, 3))
    for response in responses:
      assert response.status_code == 503
      assert "stopped before" in response.json()["detail"]
    # The search itself takes 120 seconds, the wait for the process 60.
    assert code == 0


@pytest.mark.parametrize(
  "flags, code, sentence",
  [
    (["--topk=0"], 2, "--topk: found 0, expected more than 0"),
    (["--queue=1"], 2, "--queue: found 1, expected queries (4096) or more"),
    (
      ["--token_variable=NOT_SET"],
      2,
      "nothing in the environment variable NOT",
    ),
    (["--token_variable=sk-1234"], 2, "expected the name of an environment"),
    (["--index=not_there"], 1, "found no finished index"),
    (["--port={taken}"], 1, "name another --port"),
  ],
)
def test_invalid_server_is_refused(index, flags, code, sentence):
  with socket.create_server(("127.0.0.1", 0)) as taken:
    port = taken.getsockname()[1]
    done = subprocess.run(
      [
        *(sys.executable, "-m", "launch.serve_retriever", f"--index={index}"),
        *(flag.format(taken=port) for flag in flags),
      ],
      cwd=ROOT,
      capture_output=True,
      text=True,
      timeout=120,
    )
  assert done.returncode == code, done.stderr
  assert "sk-1234" not in done.stderr
  assert sentence in " ".join(f"{done.stdout} {done.stderr}".split())
  assert "Traceback" not in done.stderr
