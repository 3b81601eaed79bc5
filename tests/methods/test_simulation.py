"""The simulated search engine: its passages, and how often they are noisy."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest
import scripted
import small_run

from anysearch_jax import config as config_lib
from anysearch_jax import types
from anysearch_jax.environment import wording
from anysearch_jax.generative_retrieval import simulation, text_model
from anysearch_jax.launch import parts, policies
from anysearch_jax.methods import systems, zerosearch
from anysearch_jax.retrieval import lexical
from anysearch_jax.rollout import searching
from anysearch_jax.world import world as world_lib
from anysearch_jax.world import world_retrieval

WORLD = world_lib.World()
REAL = lexical.LexicalRetriever(WORLD.corpus, reads=WORLD.searched)
QUESTIONS = WORLD.questions("train", 30, 0)
NOISE = zerosearch.Options()


def context(question, *, rollout=0, place=0, sample=0, turn=0):
  return types.SearchContext(
    types.Address(rollout, place, sample), turn, question, "so far"
  )


def request(query, context, k=3):
  return types.SearchRequest(query, k, context.question.corpus, context)


def simulated(simulator, config=NOISE):
  return simulation.SimulatedRetriever(simulator, config, rollouts=10, seed=0)


def world_simulator():
  return world_retrieval.WorldSimulator(WORLD, REAL, seed=0)


def always(noise):
  return dataclasses.replace(NOISE, noise_start=noise, noise_end=noise)


def searches():
  """Returns searches for every fact on the paths to the answers.

  Each fact is searched by its wording and by its subject.
  """
  for place, question in enumerate(QUESTIONS):
    for turn, fact in enumerate(question.metadata["facts"]):
      for query in (
        f"{fact['entity']} {fact['relation']}",
        f"{fact['entity']} verdict",
        f"{fact['value']} {fact['relation']}",
      ):
        yield request(query, context(question, place=place, turn=turn))


def find(simulator, each, noisy):
  return asyncio.run(simulator.find(each, noisy=noisy))


@pytest.mark.parametrize("rollout", [0, 7, 25])
def test_share_of_noisy_searches_follows_the_schedule(rollout):
  retriever = simulated(world_simulator())
  drawn = [
    retriever.noisy(
      context(
        QUESTIONS[0], rollout=rollout, place=place, sample=sample, turn=turn
      )
    )
    for place in range(100)
    for sample in range(5)
    for turn in range(4)
  ]
  # After the last rollout, the probability stays at its final value.
  expected = zerosearch.noise(min(rollout / 10, 1.0), NOISE)
  deviation = (expected * (1 - expected) / len(drawn)) ** 0.5
  share = sum(drawn) / len(drawn)
  assert abs(share - expected) <= 4 * deviation
  assert rollout > 0 or not any(drawn)


def test_noisy_passages_do_not_contain_the_right_answer():
  changed = golds = 0
  for each in searches():
    (gold,) = each.context.question.golden_answers
    real = REAL.lookup(each.query, each.k, each.corpus)
    assert find(world_simulator(), each, False) == real
    noisy = find(world_simulator(), each, True)
    assert len(noisy) == len(real)
    for was, now in zip(real, noisy, strict=True):
      assert gold not in f"{now.title} {now.text}".split()
      golds += gold in f"{was.title} {was.text}".split()
      before, after = was.text.split(), now.text.split()
      assert len(before) == len(after)
      for old, new in zip(before, after, strict=True):
        if old not in WORLD.index:
          assert new == old
          continue
        changed += 1
        assert new != old
        (kind,) = (
          members
          for members in WORLD.members.values()
          if WORLD.index[old] in members
        )
        assert WORLD.index[new] in kind
      assert now.title == was.title or was.title == gold
  assert changed > 50 and golds > 25


def test_answers_do_not_depend_on_order():
  asked = [
    dataclasses.replace(
      each,
      context=dataclasses.replace(
        each.context, address=each.context.address._replace(sample=sample)
      ),
    )
    for each in searches()
    for sample in range(2)
  ]

  async def ask(order):
    searcher = searching.BatchingRetriever(
      simulated(world_simulator(), always(0.5)), config_lib.SearchConfig()
    )
    found = await asyncio.gather(*(searcher.search(asked[i]) for i in order))
    return dict(zip(order, found, strict=True))

  forward = asyncio.run(ask(range(len(asked))))
  assert asyncio.run(ask(range(len(asked) - 1, -1, -1))) == forward
  # Samples of one question do not share cached answers.
  assert any(
    forward[i] != forward[i + 1] for i in range(0, len(asked), 2) if forward[i]
  )


def asked_of_a_model(said, noise, query):
  """Returns what a search finds, and the prompt of the simulator."""
  engine = scripted.Engine(lambda request: said)
  model = text_model.EngineModel(config_lib.TextModelConfig(), stop=())
  retriever = simulated(simulation.ModelSimulator(model), always(noise))
  searching.attach(
    searching.BatchingRetriever(retriever, config_lib.SearchConfig()),
    engine,
    scripted.CODEC,
  )
  question = types.Question("q", "who {is} it?", ("Ann", "Anna"))
  found = asyncio.run(retriever.search(request(query, context(question))))
  return found, scripted.CODEC.decode(engine.requests[0].token_ids)


def test_a_noisy_prompt_does_not_know_the_question():
  said = (
    "<think>Doc 9: no</think>Noisy documents:\n"
    'Doc 1(Title: "A (river)") it is\n long\n\n'
    "**Doc 2**: (Title: B) short\nDoc 3: untitled\nDoc 4(Title: C) more"
  )
  found, prompt = asked_of_a_model(said, 1.0, "it")
  # Only k documents are kept; the fourth document's mark ends the third.
  assert [(p.id, p.title, p.text) for p in found] == [
    ("simulated/noisy/1", '"A (river)"', "it is long"),
    ("simulated/noisy/2", '"B"', "short"),
    ("simulated/noisy/3", "", "untitled"),
  ]
  assert "Write 3 noisy" in prompt and "Query: it\nNoisy" in prompt
  assert "who {is} it?" not in prompt and "Ann" not in prompt


def test_a_useful_prompt_knows_the_question_and_its_answers():
  _, prompt = asked_of_a_model("Doc 1: it is", 0.0, "{k}")
  for part in ("who {is} it?", "Ann or Anna", "Query: {k}", "Write 3 useful"):
    assert part in prompt


@pytest.mark.parametrize(
  ("reply", "texts"),
  [
    ("1. one\n\n- two\nthree", ["one", "two", "three"]),
    ("document 1. one\nDOCUMENT 2: two", ["one", "two"]),
    ("Doc 1: the Doc 7 of it\nDoc 2:\nDoc 3: x", ["the Doc 7 of it", "x"]),
    (" \n", []),
  ],
)
def test_replies_in_other_formats_are_parsed(reply, texts):
  found = simulation.passages(reply, "useful")
  assert [passage.text for passage in found] == texts


def test_reply_without_passage_fails_the_search():
  class Silent:
    async def complete(self, prompt, *, address, turn):
      return "<think>hm</think>"

  retriever = simulated(simulation.ModelSimulator(Silent()))
  with pytest.raises(types.RetrievalError, match="Found no passage"):
    asyncio.run(retriever.search(request("x", context(QUESTIONS[0]))))


def test_evaluation_against_a_simulator_is_rejected():
  source = parts.WorldSource(WORLD, REAL)
  with pytest.raises(ValueError, match="against the real retriever"):
    policies.check_playable(
      policies.PolicyChoice("scripted", "optimum"),
      config_lib.changed(small_run.CONFIG, retrieval={"simulated": "world"}),
      source,
      QUESTIONS,
    )


@pytest.mark.parametrize(
  ("progress", "changes", "expected"),
  [
    # (4^.5 - 1) / 3 = 1/3; (4^.25 - 1) / 3 = .1381.
    *((0, {}, 0.0), (0.25, {}, 0.5 * 0.138071), (0.5, {}, 0.5 / 3)),
    (1, {}, 0.5),
    (0.5, {"noise_start": 0.75, "noise_end": 0.25}, 0.75 - 0.5 / 3),
    (0.5, {"noise_start": 0.75, "noise_end": 0.25, "noise_base": 1.0}, 0.5),
  ],
)
def test_noise_rises_late_or_falls_or_is_linear(progress, changes, expected):
  found = zerosearch.noise(progress, dataclasses.replace(NOISE, **changes))
  assert found == pytest.approx(expected, abs=1e-6)


KNOWN = types.Question("q", "kelmar mayor ?", ("tol",))


class Model:
  """Replies with a text, and keeps what it was asked."""

  def __init__(self, reply):
    self.reply, self.asked = reply, []

  async def complete(self, prompt, *, address, turn):
    self.asked.append((prompt, address, turn))
    return self.reply

  def identity(self):
    return {"kind": "test"}


def ask(simulator, query="kelmar mayor", k=3):
  address = types.Address(4, 1, 2)
  context = types.SearchContext(address, 1, KNOWN, "so far")
  request = types.SearchRequest(query, k, context=context)
  return asyncio.run(simulator.find(request, noisy=False))


def world_self(reply):
  model = Model(reply)
  prompt = systems.environment("search_r1_world").plain
  return world_retrieval.SelfSimulator(model, prompt=prompt), model


def test_the_worlds_policy_is_asked_the_query_without_a_budget():
  simulator, model = world_self("<think> x ; </think> <answer> tol")
  assert ask(simulator) == (
    types.Passage("self/kelmar mayor", "kelmar", "mayor tol"),
  )
  ((prompt, address, turn),) = model.asked
  assert prompt == "budget 0 question kelmar mayor ?"
  assert (address, turn) == (types.Address(4, 1, 2), 1)


@pytest.mark.parametrize(
  "reply", ["", "<think> x", "<search> kelmar mayor", "<answer> "]
)
def test_a_policy_without_an_answer_finds_nothing(reply):
  assert ask(world_self(reply)[0]) == ()


def test_a_language_model_is_not_told_the_question_or_its_answer():
  words = {"simulator_useful": "Useful documents for {query}:"}
  texts = wording.Texts(words, file="own.toml", sha256="")
  model = Model("Doc 1(Title: Kelmar) Its mayor is Tol.\nDoc 2(Title: A) b")
  found = ask(simulation.ModelSimulator(model, texts), "mayor of K", k=1)
  assert [(p.title, p.text) for p in found] == [
    ('"Kelmar"', "Its mayor is Tol.")
  ]
  ((prompt, _, _),) = model.asked
  assert "mayor of K" in prompt
  assert KNOWN.text not in prompt and "tol" not in prompt
