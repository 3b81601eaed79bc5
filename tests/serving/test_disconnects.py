"""Clients that leave in the middle of streams, beside others, on one engine."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import threading

import httpx2
import pytest
import scripted
import small_run
from served_agent import served
from waits import wait_for

from anysearch_jax.agent import agent as agent_lib
from anysearch_jax.policy import hf
from anysearch_jax.serving import service

CONFIG = dataclasses.replace(
  small_run.CONFIG,
  engine=dataclasses.replace(small_run.CONFIG.engine, decode_steps=1),
)
QUESTION = {"input": "anything ?", "max_tool_calls": 2}


@pytest.fixture
def agent(tmp_path, monkeypatch):
  hf.save(tmp_path / "policy", small_run.parts()["policy"])
  with agent_lib.Agent.load(
    tmp_path / "policy", retriever=scripted.Retriever(), config=CONFIG
  ) as agent:
    # A random policy reads any words.
    monkeypatch.setattr(agent, "refusal", lambda text: None)
    yield agent


def test_client_that_hangs_up_fails_no_other_question(agent, monkeypatch):
  ended = []
  tell = service.Account.tell

  def counted(account, event):
    try:
      tell(account, event)
    except service.EndedError:
      ended.append(account.id)
      raise

  monkeypatch.setattr(service.Account, "tell", counted)
  with served(agent=agent, max_questions=100) as (url, running):
    is_over = threading.Event()

    def leave():
      body = QUESTION | {"stream": True}
      while not is_over.is_set():
        with httpx2.stream("POST", f"{url}/v1/responses", json=body) as stream:
          for line in stream.iter_lines():
            if "delta" in line:
              break

    def ask(seed):
      body = QUESTION | {"seed": seed}
      reply = httpx2.post(f"{url}/v1/responses", json=body, timeout=60)
      return reply.status_code

    with concurrent.futures.ThreadPoolExecutor(12) as pool:
      leaving = [pool.submit(leave) for _ in range(6)]
      statuses = list(pool.map(ask, range(100)))
      is_over.set()
    for client in leaving:
      client.result()
    wait_for(lambda: running._running == 0)
  assert statuses == [200] * 100
  assert ended  # Clients have left in the middle of a turn.
