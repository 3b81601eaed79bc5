"""The engine over text completions against a real server; skipped without one.

The server is SGLang's, as tests/rollout/test_sglang_real.py says. It gets the
weights of `sglang_chains`, whose continuations are known.
"""

from __future__ import annotations

import asyncio
import os

import httpx2
import jax.numpy as jnp
import pytest
import sglang_chains

from anysearch_jax import config as config_lib
from anysearch_jax import types
from anysearch_jax.environment import protocol
from anysearch_jax.policy import hf
from anysearch_jax.rollout import completions
from anysearch_jax.rollout.sglang import engine as sglang

_URL = os.environ.get("ANYSEARCH_SGLANG_URL", "")
if not _URL:
  pytest.skip(
    "no SGLang server; set ANYSEARCH_SGLANG_URL as test_sglang_real.py says",
    allow_module_level=True,
  )
# What each chain says, and why it ends.
EXPECTED = {
  "spelled": (types.Finish.STOP, "</search>"),
  "overhanging": (types.Finish.STOP, "</answer>"),
  "ended": (types.Finish.END_OF_TURN, " end"),
  "endless": (types.Finish.LENGTH, "q" * 12),
}


@pytest.fixture(scope="module")
def model():
  """The tokenizer and the name of a model that says the chains."""
  info = httpx2.get(f"{_URL}/model_info", trust_env=False).json()
  policy = hf.load(info["tokenizer_path"])
  loaded = sglang.SglangEngine(
    policy._replace(params=sglang_chains.params(policy)),
    config=config_lib.SglangConfig(urls=(_URL,)),
    sampling=config_lib.SamplingConfig(),
    dtype=jnp.float32,
  )
  listed = httpx2.get(f"{_URL}/v1/models", trust_env=False).json()
  yield policy.tokenizer, listed["data"][0]["id"]
  loaded.close()


def engine_of(codec, name):
  return completions.CompletionsEngine(
    f"{_URL}/v1",
    codec,
    model=name,
    sampling=config_lib.SamplingConfig(),
    deadline=60.0,
    concurrency=4,
  )


@pytest.mark.parametrize("local", [True, False])
def test_chains_are_said_to_their_ends(model, local):
  tokenizer, name = model
  codec = tokenizer if local else completions.PlainText()
  engine = engine_of(codec, name)

  async def turns():
    await engine.probe()
    return [
      await engine.generate(
        sglang_chains.request(codec.encode(chain[0]), 12, stop=protocol.STOPS)
      )
      for chain in sglang_chains.CHAINS.values()
    ]

  try:
    found = asyncio.run(turns())
  finally:
    engine.close()
  for chain, generation in zip(sglang_chains.CHAINS, found, strict=True):
    finish, text = EXPECTED[chain]
    assert (generation.finish, generation.text) == (finish, text)
  assert found[3].text == "q" * 12
  assert engine.counters["prompt_tokens"] == 5
  assert engine.counters["sampled_tokens"] > 12


def test_refusal_of_the_server_is_an_engine_error(model):
  codec, name = model
  engine = engine_of(codec, name)
  try:
    with pytest.raises(types.EngineError, match="HTTP 400"):
      asyncio.run(
        engine.generate(sglang_chains.request(codec.encode("q"), 100_000))
      )
  finally:
    engine.close()
