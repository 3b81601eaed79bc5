"""SSRL: its reward by hand, and the policy as its own search engine."""

from __future__ import annotations

import asyncio
import dataclasses

import chex
import numpy as np
import pytest
import scripted
import small_run
import spoken

from anysearch_jax import config as config_lib
from anysearch_jax import types
from anysearch_jax.config import methods as config_methods
from anysearch_jax.generative_retrieval import simulation, text_model
from anysearch_jax.methods import ssrl, systems
from anysearch_jax.world import world_retrieval
from launch import flags, retrievers

CONFIG = config_methods.SsrlConfig()
UNJITTED = ssrl.reward.__wrapped__
# Right, well formed -> reward.
TABLE = [(1, 1, 1.0), (1, 0, 0.9), (0, 1, 0.1), (0, 0, 0.0)]
QUESTION = types.Question("q", "kelmar mayor ?", ("tol",))


class RewardTest(chex.TestCase):
  @chex.variants(with_jit=True, without_jit=True)
  def test_rewards_equal_the_table(self):
    reward = self.variant(UNJITTED, static_argnames="config")
    em, formed, total = np.array(TABLE).T
    out = reward(spoken.outcomes(em, format=formed), config=CONFIG)
    np.testing.assert_allclose(out["total"], total, atol=1e-6)
    chex.assert_type(list(out.values()), np.float32)


class Model:
  """Replies with a text, and keeps what it was asked."""

  def __init__(self, reply):
    self.reply, self.asked = reply, []

  async def complete(self, prompt, *, address, turn):
    self.asked.append((prompt, address, turn))
    return self.reply

  def identity(self):
    return {"kind": "test"}


def search(simulator, query="kelmar mayor", k=3):
  address = types.Address(4, 1, 2)
  context = types.SearchContext(address, 1, QUESTION, "so far")
  request = types.SearchRequest(query, k, context=context)
  return asyncio.run(simulator.find(request, noisy=False))


def world_self(reply):
  model = Model(reply)
  prompt = systems.environment("search_r1_world").plain
  return world_retrieval.SelfSimulator(model, prompt=prompt), model


def test_the_worlds_policy_is_asked_the_query_without_a_budget():
  simulator, model = world_self("<think> x ; </think> <answer> tol")
  assert search(simulator) == (
    types.Passage("self/kelmar mayor", "kelmar", "mayor tol"),
  )
  ((prompt, address, turn),) = model.asked
  assert prompt == "budget 0 question kelmar mayor ?"
  assert (address, turn) == (types.Address(4, 1, 2), 1)


@pytest.mark.parametrize(
  "reply", ["", "<think> x", "<search> kelmar mayor", "<answer> "]
)
def test_a_policy_without_an_answer_finds_nothing(reply):
  assert search(world_self(reply)[0]) == ()


def test_a_language_model_is_not_told_the_question_or_its_answer():
  texts = ssrl.WORDINGS["ssrl"].texts()
  model = Model("Doc 1(Title: Kelmar) Its mayor is Tol.\nDoc 2(Title: A) b")
  found = search(simulation.ModelSimulator(model, texts), "mayor of K", k=1)
  assert [(p.title, p.text) for p in found] == [
    ('"Kelmar"', "Its mayor is Tol.")
  ]
  ((prompt, _, _),) = model.asked
  assert "mayor of K" in prompt
  assert QUESTION.text not in prompt and "tol" not in prompt


@pytest.mark.parametrize("preset", ["", "qwen2_5_7b"])
def test_training_searches_in_the_policy_and_is_never_noisy(preset):
  config = flags.load_config(f"configs/methods.py:ssrl:{preset}".rstrip(":"))
  assert config.retrieval.simulated == "policy"
  assert config.curriculum.fixed_budget == config.curriculum.max_budget
  made = retrievers.make(config, small_run.parts()["retriever"])
  assert isinstance(made, simulation.SimulatedRetriever)
  context = types.SearchContext(types.Address(9, 0, 0), 0, QUESTION, "")
  assert not any(
    made.noisy(
      dataclasses.replace(context, address=types.Address(rollout, q, 0))
    )
    for rollout in range(8)
    for q in range(20)
  )


def test_the_policys_calls_are_no_part_of_the_episode():
  """They sample at an address of their own, with the run's engine."""
  engine = scripted.Engine(
    lambda request: "<think>x</think><answer>tol</answer>"
  )
  model = text_model.EngineModel(
    config_lib.TextModelConfig(max_tokens=200), stop=("</answer>",)
  )
  prompt = systems.environment("search_r1_world").plain
  simulator = world_retrieval.SelfSimulator(model, prompt=prompt)
  simulator.attach(engine, scripted.CODEC)
  (passage,) = search(simulator)
  assert passage.text == "mayor tol"
  (request,) = engine.requests
  assert request.address.variant != 0
  assert model.counters["calls"] == 1
