"""Reason-in-documents: the text that a search adds to an episode."""

from __future__ import annotations

import asyncio
import dataclasses
import json

import pytest
import scripted
import small_run

from anysearch_jax import config as config_lib
from anysearch_jax import types
from anysearch_jax.generative_retrieval import refining, text_model
from anysearch_jax.launch import retrievers
from anysearch_jax.methods import search_o1, systems
from anysearch_jax.retrieval import lexical
from anysearch_jax.rollout import searching
from anysearch_jax.world import world as world_lib
from anysearch_jax.world import world_retrieval

NOTHING = "The documents say nothing that helps."
QUESTION = types.Question("q", "who?", ("secret gold",))
HITS = {
  "q": (
    types.Passage("7", "T7", "first"),
    types.Passage("https://x.org/8", 'T"8', "é" * 7000),
  ),
  "bad": (types.Passage("9", "T9", "fail"),),
}
SEARCH = config_lib.SearchConfig()


def context(text="so far", question=QUESTION):
  return types.SearchContext(types.Address(0, 1, 2), 3, question, text)


def refine(engine, *, text="so far", query="q", retriever=None, **values):
  """Returns the text that a search shows, and the retriever."""
  model = text_model.EngineModel(
    config_lib.TextModelConfig(**values), stop=("</answer>",)
  )
  retriever = refining.RefiningRetriever(
    retriever or scripted.Retriever(HITS),
    refining.ModelRefiner(model, marks=("<search>", "<information>")),
    config=SEARCH,
  )
  searcher = searching.BatchingRetriever(retriever, SEARCH)
  searching.attach(searcher, engine, scripted.CODEC)
  return asyncio.run(
    searcher.search(types.SearchRequest(query, 2, context=context(text)))
  )


def test_the_second_call_reads_query_documents_and_reasoning():
  engine = scripted.Engine(
    lambda request: "thus\n**Final Information**\n\nT7 is first.\n"
  )
  (passage,) = refine(engine, text="I wonder")
  read = "7+https://x.org/8"
  assert passage == types.Passage(read, "", "T7 is first.")
  prompt = scripted.CODEC.decode(engine.requests[0].token_ids)
  for part in ("Step 1: I wonder", "Query: q"):
    assert part in prompt
  _, first, second = prompt.split("**Web Page ")
  keys = ("id", "title", "url", "site_name", "date", "snippet", "context")
  assert first.startswith(
    '1:**\n{\n  "id": 1,\n  "title": "T7",\n  "url": "",\n'
  )
  page, _ = json.JSONDecoder().raw_decode(second.partition("\n")[2])
  values = (2, 'T"8', "https://x.org/8", "", "", "", "é" * 6000)
  assert page == dict(zip(keys, values, strict=True)) and "é" in second
  assert "secret gold" not in prompt


@pytest.mark.parametrize(
  ("reply", "text"),
  [
    ("**Final Information** a **Final Information**\n```\nb\n c\n```", "b c"),
    ("It says a.", NOTHING),
    ("**Final Information**\n \n", NOTHING),
  ],
)
def test_text_after_the_last_mark_is_shown(reply, text):
  (passage,) = refine(scripted.Engine(lambda request: reply))
  assert passage.text == text


def test_reasoning_keeps_first_step_last_ones_and_all_searches():
  steps = [
    *("one", "two", "three", "a <search>x</search>", "five"),
    *("<information>six", "seven", "eight"),
    *("nine", "ten", "eleven", "twelve"),
  ]
  shown = refining.reasoning(
    "\n\n".join(steps) + "\n\n\n", ("<search>", "<information>")
  )
  assert shown.split("\n\n") == [
    *("Step 1: one", "...", "Step 4: a <search>x</search>", "..."),
    *("Step 6: <information>six", "..."),
    *("Step 12: twelve", "Step 13: ", "Step 14: "),
  ]
  few = refining.reasoning("a\n\nb\nc\nd", ())
  assert few == "Step 1: a\n\nStep 2: b\n\nStep 3: c\n\nStep 4: d"
  assert refining.reasoning("", ()) == "Step 1: "


@pytest.mark.parametrize(
  ("engine", "retriever", "error"),
  [
    (
      scripted.Engine(lambda request: "x", seconds=lambda: 30.0),
      scripted.Retriever(HITS),
      types.EngineError,
    ),
    (
      scripted.Engine(lambda request: "x"),
      scripted.Retriever(error=types.RetrievalError("gone")),
      types.RetrievalError,
    ),
  ],
)
def test_failed_call_fails_the_search(engine, retriever, error):
  with pytest.raises(error):
    refine(engine, retriever=retriever, deadline=0.01)


def test_search_o1_episode_reads_refined_text():
  """The policy's engine plays both parts; the second fails in one episode."""
  first, last = search_o1.QUERY

  def say(request):
    context = scripted.CODEC.decode(request.token_ids)
    if request.turn >= 1 << 20:
      if "fail" in context:
        raise types.EngineError("no room")
      return "**Final Information** T7 came first." + last + "never"
    if "came first" in context:
      return r"\boxed{T7}"
    return f"{first}{'bad' if 'is it' in context else 'q'}{last}"

  config = dataclasses.replace(
    small_run.CONFIG,
    episode=config_lib.EpisodeConfig(prompts="search_o1"),
    retrieval=config_lib.RetrievalConfig(refined="policy"),
  )
  engine = scripted.Engine(say)
  real = scripted.Retriever(HITS)
  retriever = searching.BatchingRetriever(retrievers.make(config, real), SEARCH)
  searching.attach(retriever, engine, scripted.CODEC)

  def play(text):
    question = types.Question("q", text, ("T7",))
    return scripted.play(
      engine,
      retriever,
      config.episode,
      budget=2,
      question=question,
      place=len(text),
    )

  played = play("who?")
  env = systems.environment("search_o1")
  assert env.answer(played.spans) == "T7"
  shown = played.spans[1].text
  assert search_o1.RESULT[0] + "T7 came first." in shown
  assert "first\n" not in shown and last not in shown
  (observation,) = played.observations
  assert [(p.id, p.title) for p in observation.passages] == [
    ("7+https://x.org/8", "")
  ]
  # The next turn sends the whole context again: its cache was released.
  contexts = [r.token_ids for r in engine.requests if r.turn < 1 << 20]
  assert contexts[1][: len(contexts[0])] == contexts[0]
  failed = play("who is it?")
  assert failed.outcome is types.Outcome.FAILED
  assert "no room" in failed.reason


def test_only_servers_apply_a_repetition_penalty():
  retrieval = config_lib.RetrievalConfig(
    refined="policy",
    model=config_lib.TextModelConfig(repetition_penalty=1.05),
  )
  config = dataclasses.replace(small_run.CONFIG, retrieval=retrieval)
  with pytest.raises(
    ValueError, match="found 1.05 for the policy's own engine"
  ):
    retrievers.make(config, scripted.Retriever(HITS))
  served = config_lib.changed(config, engine={"kind": "sglang"})
  retriever = retrievers.make(served, scripted.Retriever(HITS))
  engine = scripted.Engine(lambda request: "x")
  searching.attach(retriever, engine, scripted.CODEC)
  asked = types.SearchRequest("q", 2, context=context())
  asyncio.run(retriever.search(asked))
  assert engine.requests[0].repetition_penalty == 1.05


def test_world_refiner_keeps_only_requested_facts():
  world = world_lib.World()
  real = lexical.LexicalRetriever(world.corpus, reads=world.searched)
  retriever = refining.RefiningRetriever(
    real, world_retrieval.WorldRefiner(), config=SEARCH
  )
  kept = emptied = 0
  for question in world.questions("train", 20, 0):
    nobody = dataclasses.replace(question, text="?", golden_answers=())
    for fact in question.metadata["facts"]:
      for asked in (fact["relation"], fact["alternative"], "verdict"):
        query = f"{fact['entity']} {asked}"
        found, unknowing = (
          asyncio.run(
            retriever.search(
              types.SearchRequest(query, 5, question.corpus, context("", who))
            )
          )
          for who in (question, nobody)
        )
        # The refiner does not read the answers.
        assert found == unknowing
        whole = real.lookup(query, 5, question.corpus)
        for now, was in zip(found, whole, strict=True):
          assert (now.id, now.title) == (was.id, was.title)
          first, *rest = was.text.split()
          if was.title == fact["entity"] and first == asked:
            assert now.text == was.text
            kept += 1
          elif "filler" in was.id:
            assert now.text == was.text
          else:
            # The subject's or another entity's value, and which one it is.
            assert now.text == " ".join(rest).split(maxsplit=1)[1].replace(
              "confirmed ", ""
            )
            emptied += 1
  assert kept > 50 and emptied > 50
