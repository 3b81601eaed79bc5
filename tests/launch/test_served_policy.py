"""`launch.serve` with the shipped policy: a real server, engine and signals."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time

import commands
import foreign_pages
import httpx2
import openai
import pytest
from waits import wait_for

from anysearch_jax.launch import serve

CONFIG = "--config=configs/quickstart.py"


# An SGLang server, as tests/rollout/test_sglang_real.py says, with this policy.
SGLANG = os.environ.get("ANYSEARCH_SGLANG_URL", "")
POLICY = "configs/graded_world_policy"


@contextlib.contextmanager
def serving(*flags, log=None):
  """Yields the address of a served policy; it ends by SIGTERM with status 0."""
  command = [
    sys.executable,
    "-m",
    "anysearch_jax.launch.serve",
    CONFIG,
    "--port=0",
  ]
  process = subprocess.Popen(
    [*command, "--threads=1", *flags],
    stdout=subprocess.PIPE,
    stderr=log,
    text=True,
  )
  try:
    greeting = process.stdout.readline()
    yield re.search(r" at (http://\S+)$", greeting.strip())[1]
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0
  finally:
    process.kill()
    process.wait(60)
    process.stdout.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory):
  """A served warm start and its log."""
  log = tmp_path_factory.mktemp("serve") / "log"
  with open(log, "w") as written, serving(log=written) as url:
    yield url, log


def asked(client, questions):
  """Asks questions and returns the searches that were made."""
  searches = 0
  for question in questions:
    response = client.responses.create(
      model="quickstart", input=question, max_tool_calls=3
    )
    assert response.status == "completed" and response.output_text
    calls = [i for i in response.output if i.type == "web_search_call"]
    assert len(calls) == response.usage.searches <= 3
    searches += len(calls)
  return searches


def pages_used(url):
  text = httpx2.get(f"{url}/metrics").text
  return float(re.search(r"^anysearch_kv_pages_used (\S+)", text, re.M)[1])


def test_examples_can_be_asked_through_the_official_client(server):
  url, log = server
  examples = httpx2.get(f"{url}/examples").json()
  assert len(examples) >= 5
  client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
  asked(client, examples[:2])
  last = json.loads(log.read_text().splitlines()[-1])
  assert last["status"] == 200 and last["route"] == "responses"
  assert "question" not in last


def test_page_of_somebody_else_asks_nothing(server):
  foreign_pages.check(server[0], "/v1/responses")


@pytest.mark.skipif(not SGLANG, reason="no server; set ANYSEARCH_SGLANG_URL")
@pytest.mark.parametrize("how", ["sglang", "openai"])
def test_policy_that_a_server_samples_answers_both_apis(how):
  folder = httpx2.get(f"{SGLANG}/model_info", trust_env=False).json()
  if not folder["tokenizer_path"].endswith(POLICY):
    pytest.skip(f"the server has another policy than {POLICY}")
  listed = httpx2.get(f"{SGLANG}/v1/models", trust_env=False).json()
  model = listed["data"][0]["id"]
  flags = {
    "sglang": [f"--sglang={SGLANG}"],
    "openai": [f"--openai={SGLANG}/v1", f"--openai_model={model}"],
  }[how]
  with serving(f"--hf={POLICY}", *flags) as url:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    examples = httpx2.get(f"{url}/examples").json()[:4]
    assert asked(client, examples)

    def greedy(seed):
      found = client.chat.completions.create(
        model="quickstart@2",
        messages=[{"role": "user", "content": examples[1]}],
        temperature=0,
        seed=seed,
      )
      return found.choices[0].message

    assert greedy(1) == greedy(2)
    question = {"model": "quickstart", "input": examples[0]}
    told = list(client.responses.create(**question, stream=True))
  assert told[-1].type == "response.completed"


def test_temperature_of_a_request_is_honoured(server):
  """Greedy answers do not depend on the seed."""
  url, _ = server
  question = httpx2.get(f"{url}/examples").json()[3]

  def said(seed, temperature):
    body = {"input": question, "max_tool_calls": 2, "seed": seed}
    body["temperature"] = temperature
    found = httpx2.post(f"{url}/v1/responses", json=body).json()
    return [
      item.get("content") or item["action"]["query"] for item in found["output"]
    ]

  assert said(1, 0) == said(2, 0)
  assert len({str(said(seed, 2)) for seed in range(4)}) > 1


def test_pages_of_clients_that_left_are_free_within_a_second(server):
  url, _ = server
  examples = httpx2.get(f"{url}/examples").json()
  address = ("127.0.0.1", int(url.rpartition(":")[2]))

  def hang_up(question):
    body = json.dumps({"input": question, "stream": True}).encode()
    head = (
      "POST /v1/responses HTTP/1.1\r\nhost: localhost\r\n"
      f"content-length: {len(body)}"
    )
    with socket.create_connection(address, timeout=10) as connection:
      connection.sendall(head.encode() + b"\r\n\r\n" + body)
      connection.recv(100)

  with concurrent.futures.ThreadPoolExecutor(16) as pool:
    list(pool.map(hang_up, examples[:32]))
  start = time.monotonic()
  wait_for(lambda: pages_used(url) == 0)
  assert time.monotonic() - start < 15  # One second on a quiet machine.


@pytest.mark.parametrize(
  "arguments, said",
  [
    (["--host=0.0.0.0"], "found no --keys"),
    (["--new_key=alice"], "found no --keys"),
    (["--keys=/nowhere/keys.json"], "/nowhere/keys.json"),
    (["--hf=nowhere"], "nowhere: no config.json"),
  ],
)
def test_bad_flags_are_one_sentence(arguments, said):
  assert said in commands.run(serve, CONFIG, *arguments)


def test_new_key_is_printed_once(tmp_path):
  path = tmp_path / "keys.json"
  _, printed = commands.printed(serve, f"--keys={path}", "--new_key=alice")
  assert printed.startswith("sk-") and printed.strip() not in path.read_text()
