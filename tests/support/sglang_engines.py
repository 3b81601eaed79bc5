"""Engines over fake servers, SGLang's unless named, for the engine's tests."""

from __future__ import annotations

import asyncio

import fake_sglang
import jax
import numpy as np
import pytest
import random_models
import small_policy

from anysearch_jax import config as config_lib
from anysearch_jax import types
from anysearch_jax.environment import protocol
from anysearch_jax.policy import hf, lora
from anysearch_jax.rollout.servers import engine as servers_engine
from anysearch_jax.rollout.servers import server as server_lib
from anysearch_jax.rollout.servers import sglang

PROMPT = fake_sglang.ids("a", "b", "c", "a", "b")
SPACE = fake_sglang.ids(" ")[0]


def policy():
  """Returns a policy with the fake servers' tokenizer."""
  a = small_policy.architecture(
    fake_sglang.VOCAB, d_model=8, head_dim=4, mlp_dim=8
  )
  return hf.Policy(random_models.params(a), a, fake_sglang.tokenizer())


def adapted(seed=None):
  """Returns `policy` with adapters: new ones, or random ones of a seed."""
  bare = policy()
  config = config_lib.LoraConfig(rank=2, alpha=4.0)
  a = lora.attach(bare.architecture, config)
  new = lora.initialize(a, 0)
  if seed is not None:
    rng = np.random.default_rng(seed)
    new = jax.tree.map(
      lambda p: rng.normal(0, 0.3, p.shape).astype(np.float32), new
    )
  return bare._replace(params=lora.combine(bare.params, new), architecture=a)


def connect(
  *,
  sampling=None,
  start=None,
  records=False,
  dialect=sglang.SglangServer,
  **config,
):
  """Returns an engine with at most two tries and short timeouts."""
  return servers_engine.ServersEngine(
    start or policy(),
    dialect=dialect,
    records=records,
    config=config_lib.ServersConfig(**{"retries": 1, "wait": 0.3} | config),
    sampling=sampling or config_lib.SamplingConfig(),
  )


@pytest.fixture
def serve(monkeypatch):
  """Starts fake servers and an engine over them; stops both at the end."""
  monkeypatch.setattr(server_lib, "_FIRST_PAUSE", 0.001)
  servers, engines = [], []

  def start(
    script=(),
    *,
    count=1,
    seconds=0.0,
    faults=None,
    flags=None,
    fake=fake_sglang.Server,
    **config,
  ):
    new = [fake(script, seconds=seconds).__enter__() for _ in range(count)]
    servers.extend(new)
    new[-1].faults.update(faults or {})
    for server in new:
      server.lora = flags or {}
    engines.append(connect(**{"urls": tuple(s.url for s in new)} | config))
    return (engines[-1], *new)

  yield start
  for engine in engines:
    engine.close()
  for server in servers:
    server.__exit__()


def request(*, question=0, sample=0, most=20, context=PROMPT, turn=0):
  address = types.Address(0, question, sample)
  return types.GenerateRequest(
    address, turn, tuple(context), most, protocol.STOPS
  )


def turn(engine, **settings):
  return asyncio.run(engine.generate(request(**settings)))


def changed(**meta):
  """Changes the meta information of a right reply."""

  def change(reply):
    return reply | {"meta_info": reply["meta_info"] | meta}

  return change


def spans(*found):
  """Makes a reply name other weights; "" stands for the right ones."""

  def change(reply):
    right = reply["meta_info"]["weight_version"]
    values = [
      {"version": name or right, "start": start, "end": end}
      for name, start, end in found
    ]
    return changed(weight_versions=values)(reply)

  return change


def overrun(server):
  """Makes a server miss every stop text."""
  right, missed = server._generate, {"stop": [], "stop_regex": []}
  server._generate = lambda body: right(
    body | {"sampling_params": body["sampling_params"] | missed}
  )
