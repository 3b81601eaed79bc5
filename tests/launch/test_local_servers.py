"""Without a flag for a policy, models of this machine's servers are found."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import socket
import threading
import time

import chat_endpoint
import commands
import pytest
import waits
import web_site

from anysearch_jax.launch import ask, evaluate, local_servers, serve

QUESTION = "When does the lease end?"


@pytest.fixture
def documents(tmp_path):
  (tmp_path / "notes").mkdir()
  (tmp_path / "notes/lease.md").write_text("# Lease\n\nIt ends in June 2027.\n")
  return f"--documents={tmp_path / 'notes'}", f"--index={tmp_path / 'index'}"


@pytest.fixture
def ports(monkeypatch):
  """The ports that are asked; a test adds its servers."""
  ports = {waits.free_port(): "nobody"}
  monkeypatch.setattr(local_servers, "PORTS", ports)
  return ports


@contextlib.contextmanager
def served(ports, **models):
  """Serves models; a key names the program that serves them."""
  with contextlib.ExitStack() as stack:
    for server, names in models.items():
      endpoint = stack.enter_context(chat_endpoint.served(models=names))
      ports[endpoint.site.port] = server
    yield endpoint


def test_the_usual_ports_are_those_of_the_documentation():
  assert {8080, 11434, 1234, 8000, 30000} == set(local_servers.PORTS)


@pytest.mark.parametrize("proxy", ["", "http://127.0.0.1:9"])
def test_the_only_model_is_taken(documents, ports, capsys, monkeypatch, proxy):
  for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
    monkeypatch.setenv(name, proxy)
  monkeypatch.delenv("no_proxy", raising=False)
  monkeypatch.delenv("NO_PROXY", raising=False)
  said = []
  monkeypatch.setattr(local_servers.stopping, "say", said.append)
  with served(ports, Ollama=["nomic-embed-text", "qwen3:8b"]) as server:
    ended, printed = commands.printed(ask, *documents, QUESTION)
  assert ended == 0 and "answer: In June 2027 [1]." in printed
  assert said[0].startswith(
    f"left out nomic-embed-text at {server.url} (Ollama)"
  )
  assert said[1] == f"model: qwen3:8b at {server.url} (Ollama)"


@pytest.mark.parametrize(
  "name",
  [
    "nomic-embed-text:latest",
    "text-embedding-3-small",
    "all-minilm:l6",
    "BAAI/bge-m3",
    "intfloat/multilingual-e5-large",
    "Qwen/Qwen3-Reranker-4B",
    "thenlper/gte-base",
  ],
)
def test_models_that_write_no_texts_are_not_taken(documents, ports, name):
  with served(ports, Ollama=[name]):
    ended = commands.run(ask, *documents, QUESTION)
  assert "no chat model at 127.0.0.1" in ended


@pytest.mark.parametrize("name", ["gemma3n:e2b", "bigger:7b", "mybge", "qwen"])
def test_models_that_write_texts_are_taken(ports, name):
  with served(ports, Ollama=[name]):
    assert local_servers.choose().name == name


def test_of_several_models_the_flags_are_listed(documents, ports):
  with served(ports, Ollama=["a:1", "b c"], vLLM=["d"]) as last:
    ended = commands.run(ask, *documents, QUESTION)
  first, *lines = ended.splitlines()
  assert first.endswith(
    "Found 3 models at the servers of this machine, expected the flags of one:"
  )
  assert len(lines) == 3
  assert lines[1].endswith("--openai_model='b c'")
  assert lines[2] == f"  --openai={last.url} --openai_model=d"


@pytest.mark.parametrize("asked", ["b", "b:latest"])
def test_a_name_alone_picks_a_model(ports, asked):
  with served(ports, Ollama=["a", "b:latest"], vLLM=["d"]):
    assert local_servers.choose(asked).name == "b:latest"


def test_a_name_may_be_of_a_model_that_is_left_out(ports):
  with served(ports, Ollama=["a", "my-embedder"]):
    assert local_servers.choose("my-embedder").name == "my-embedder"


def test_an_unknown_name_is_refused_with_the_known_ones(documents, ports):
  with served(ports, Ollama=["a", "b"]):
    ended = commands.run(ask, *documents, "--openai_model=c", QUESTION)
  assert "--openai_model=c: found no such model" in ended
  assert ended.endswith("expected one of a, b.")


@pytest.mark.parametrize("command", [ask, serve])
def test_nothing_found_is_one_sentence_with_what_to_start(
  documents, ports, command
):
  (port,) = ports
  ended = commands.run(command, *documents)
  assert len(ended.splitlines()) == 1
  for part in (f"{port} (nobody)", "ollama serve", "llama-server", "--local="):
    assert part in ended


def test_evaluations_name_their_policy(documents, ports, tmp_path):
  arguments = (*documents, f"--output={tmp_path / 'run'}")
  with served(ports, Ollama=["a"]) as server:
    ended = commands.run(evaluate, *arguments)
    assert server.site.asked == []
  assert ended.startswith("Found 0 policies")


@pytest.mark.parametrize(
  ("status", "text"), [(401, "Invalid API key"), (503, "Loading model")]
)
def test_a_server_that_refuses_is_named(documents, ports, status, text):
  reply = json.dumps({"error": {"message": text}}).encode()
  with web_site.Site("127.0.0.1") as site:
    site.pages["/v1/models"] = web_site.reply(status, reply)
    ports[site.port] = "vLLM"
    ended = commands.run(ask, *documents, QUESTION)
  assert f":{site.port}/v1/models: HTTP {status}" in ended and text in ended


def send(connection, data):
  connection.recv(4096)
  with contextlib.suppress(OSError):
    while data:
      connection.sendall(data)
      data = data if len(data) > 1000 else b""
    time.sleep(5)


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"


@pytest.mark.parametrize(
  "data",
  [
    b"",  # A hang.
    b"\x00\x01SSH-2.0 nothing of HTTP\r\n" * 10,
    HEAD + b"Content-Length: 1000000000\r\n\r\n" + b"[" * 2000,
    HEAD + b"Content-Length: 15\r\n\r\n<html>Hi</html>",
    HEAD + b"Content-Length: 2\r\n\r\n[]",
    HEAD + b'Content-Length: 25\r\n\r\n{"data":[1,{"id":[2]},{}]}',
    HEAD + b"Content-Length: 5\r\n\r\n{",
    b"HTTP/1.1 429 Busy\r\nRetry-After: 60\r\nContent-Length: 0\r\n\r\n",
    b"HTTP/1.1 302 Go\r\nLocation: http://x.test/\r\nContent-Length: 0\r\n\r\n",
  ],
)
def test_other_servers_are_passed_over_in_time(ports, data):
  listener = socket.create_server(("127.0.0.1", 0))
  ports[listener.getsockname()[1]] = "other"

  def answer():
    with contextlib.suppress(OSError):
      send(listener.accept()[0], data)

  threading.Thread(target=answer, daemon=True).start()
  with listener, served(ports, Ollama=["a"]):
    start = time.monotonic()
    models, refusals = local_servers.find()
    seconds = time.monotonic() - start
  assert [model.name for model in models] == ["a"] and refusals == []
  assert seconds < 3  # All at once, on a busy machine.


def test_a_user_chooses_on_a_terminal(ports, monkeypatch, capfd):
  ours, theirs = pty.openpty()
  os.write(ours, b"9\nx\n2\n")
  with (
    served(ports, Ollama=["a", "b"]) as server,
    open(theirs, "r+b", buffering=0) as raw,
    open(os.dup(theirs)) as stdin,
    open(os.dup(theirs), "w") as stderr,
  ):
    del raw
    monkeypatch.setattr("sys.stdin", stdin)
    monkeypatch.setattr("sys.stderr", stderr)
    model = local_servers.choose()
  assert model == ("b", server.url, "Ollama")
  shown = os.read(ours, 4096).decode()
  assert f"  1  a at {server.url} (Ollama)" in shown
  assert shown.count("Number of the model, 1 to 2: ") == 3
  os.close(ours)
