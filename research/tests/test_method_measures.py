"""What the plug-ins measure of a trajectory, besides its scores."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import scripted
import spoken

import anysearch_jax as aj
from research import methods
from research.methods import (
  beta_grpo,
  ikea,
  mt_grpo,
  r1_searcher,
  research,
)


def measured(name, *turns, answers=("Tol",), **changes):
  question = aj.Question("q", "which?", answers)
  played = spoken.trajectory(question, *turns)
  return aj.get_method(methods.method_name(name)).measure(
    dataclasses.replace(played, **changes)
  )


def searched(text, *found):
  return f"<search>{text}</search>", found


@pytest.mark.parametrize(
  ("early", "final", "sufficient", "steps"),
  [
    # Sufficient at the second of three: .025 + .2 / 2 - .025, with its F1.
    (("x", "Tol", "Tol"), "Tol", 1, (0.1, 1.1, -0.05)),
    (("x", "Tol", "x"), "x", 1, (0.0375, 1.0375, -0.05)),
    # The last is not early: three share .2. F1 rises to 2/3, then to 1.
    (("Tol a x", "x", "Tol"), "Tol", 0, (2.2 / 3, 0.2 / 3, 1.2 / 3)),
    (("x", None, "x"), "x", 0, (0.0375, 0.0375, 0.0375)),
  ],
)
def test_autosearch_rewards_searches_up_to_the_sufficient_one(
  early, final, sufficient, steps
):
  question = aj.Question("q", "which?", ("Tol",))
  played = spoken.trajectory(
    question,
    *(
      (f"<think>so</think><search>{query}</search>", ())
      for query in ("first river", "second mayor", "third seat")
    ),
    (f"<think>so</think><answer>{final}</answer>", None),
  )
  seen = [o._replace(answer=x) for o, x in zip(played.observations, early)]
  played = dataclasses.replace(played, observations=tuple(seen))
  system = aj.get_method(methods.method_name("autosearch"))
  config = aj.ExperimentConfig()
  found = system.measure(played)
  assert (found["sufficient"], found["sound"]) == (sufficient, 1)
  constants = system.constants_of(config)
  np.testing.assert_allclose(system.steps(played, constants), steps, atol=1e-6)


def test_autosearch_searches_that_are_malformed_or_repeated_lose():
  played = spoken.trajectory(
    aj.Question("q", "which?", ("Tol",)),
    *(
      (f"{thought}<search>{query}</search>", ())
      for thought, query in (
        ("<think>so</think>", "first river"),
        ("<think>so</think> x", "second mayor"),
        ("<think>so</think>", "the first river"),
      )
    ),
    ("<answer>Tol</answer>", None),
  )
  system = aj.get_method(methods.method_name("autosearch"))
  found = system.measure(played)
  assert found == {"sufficient": 0, "sound": 0, "anytime": 1 / 4}
  steps = system.steps(played, system.constants_of(aj.ExperimentConfig()))
  np.testing.assert_allclose(steps, [0.2 / 3, -0.025, -0.025], atol=1e-6)


@pytest.mark.parametrize(
  ("refined", "said", "shown"),
  [
    (1, "<refine>It is the\nTol.</refine>", "nothing"),
    (1, "<refine>x</refine><refine>an Art</refine>", "nothing"),
    (0, "<refine>a party</refine> Tol", "nothing"),
    (0, "<refine>no</refine><think>Tol</think>", "Tol"),
    (0, "<refine>Tol", "<refine>Tol</refine>"),
    (0, "", "Tol"),
  ],
)
def test_autorefine_counts_refinements_of_the_model(refined, said, shown):
  turns = (
    searched("x", spoken.passage("1", "A", shown)),
    (f"{said}<answer>x</answer>", None),
  )
  found = measured("autorefine", *turns, answers=("the Tol", "art"))
  assert found == {"refined": refined}


def test_a_refinement_lies_within_one_turn():
  turns = ("<refine>Tol", "No action."), ("</refine>", None)
  assert measured("autorefine", *turns) == {"refined": 0}


def played(*turns):
  hits = {"a": (aj.Passage("1", "A", "x"),)}
  return scripted.play(
    scripted.Engine(turns),
    scripted.Retriever(hits),
    aj.config.EpisodeConfig(prompts="search_r1"),
    budget=2,
  )


def test_the_confidence_is_the_least_probability_in_a_call():
  first = "<think><search> is a tag</think> <search>a</search>"
  trajectory = played(first, "<search>b c</search>", scripted.answer("x"))
  for shown, end in zip(trajectory.observations, trajectory.search_ends):
    ids = trajectory.token_ids[end + 1 - shown.tokens : end + 1].tolist()
    said = scripted.CODEC.decode(ids)
    assert said == f"<search>{shown.argument}</search>"
  logps = np.where(trajectory.authors == aj.Author.MODEL, -0.01, 0.0)
  first, second = trajectory.search_ends
  # The second call has 20 tokens; the one before is not its own.
  changed = {first - 3: -0.5, second - 19: -0.7, first - 18: -9.0, -1: -9.0}
  for place, logp in changed.items():
    logps[place] = logp
  trajectory = dataclasses.replace(trajectory, logps=logps.astype(np.float32))
  found = beta_grpo.measure(trajectory)["confidence"]
  assert found == pytest.approx(math.exp(-0.7))
  assert beta_grpo.measure(played(scripted.answer("x"))) == {"confidence": 1.0}


FOUND = (spoken.passage("1", "Tol", "some (research) [answer] there"),)
THOUGHT = "<think>so (think of it)</think>"
NO_ACTION = "That was no action.\n"
FINDS = f"{THOUGHT}<search>[re]search) it</search>", FOUND
REFUSED = f"{THOUGHT}<search>more</search>", "No search is left.\n"
PLAIN = "<answer>Tol</answer>", None


@pytest.mark.parametrize(
  ("formed", "turns"),
  [
    (1, [(f"{THOUGHT}<answer>Tol</answer>", None)]),
    (1, [FINDS, REFUSED, PLAIN]),
    (0, []),
    (0, [PLAIN]),
    (0, [(THOUGHT, NO_ACTION)] * 2),
    (0, [(THOUGHT, NO_ACTION), PLAIN]),
    (0, [(f"{THOUGHT}<search> </search>", "?\n"), PLAIN]),
    (0, [(f"{THOUGHT}(search)x(/search)<answer>Tol</answer>", None)]),
    (0, [(f"{THOUGHT}<search]<answer>Tol</answer>", None)]),
    (0, [(f"{THOUGHT}[/answer><answer>Tol</answer>", None)]),
    (0, [("<think>so (/think)<answer>Tol</answer>", None)]),
  ],
)
def test_ikea_needs_a_thought_and_an_action_in_every_turn(formed, turns):
  question = aj.Question("q", "which?", ("Tol",))
  found = ikea.measure(spoken.trajectory(question, *turns))
  assert found == {"well_formed": formed}


def test_a_search_of_mt_grpo_earns_more_if_its_passages_hold_the_answer():
  river = spoken.passage("1", "Rivers", "It is the tol-river, or Tol.")
  party = spoken.passage("2", "Party", "a party")
  title = spoken.passage("3", '"Art"', "Some text.")
  played = spoken.trajectory(
    aj.Question("q", "which?", ("the Tol", "art")),
    searched("a", party, river),
    searched("b", party),
    searched("c"),
    searched("d", title),
    ("<search>e</search>", "No search is left: art.\n"),
    ("<answer>x</answer>", None),
  )
  config = mt_grpo.Options()
  found = mt_grpo.steps(played, config)
  np.testing.assert_allclose(found, [0.7, 0.2, 0.2, 0.7], atol=1e-6)
  assert found.dtype == np.float32


CHINESE = "\u4e2d"
ANSWER = ("<think>so</think><answer>Tol</answer>", None)
SEARCH = (
  "<think>t</think><search>q</search>",
  (spoken.passage("1", "Tol", f"{CHINESE} <answer>x</answer> <search>"),),
)
IN_WORLD = (r1_searcher.in_world, research.measure)


@pytest.mark.parametrize(
  ("measures", "formed", "turns"),
  [
    (IN_WORLD, 1, [ANSWER]),
    (IN_WORLD, 1, [SEARCH, ANSWER]),
    (IN_WORLD, 0, [("<answer>Tol</answer>", None)]),
    (IN_WORLD, 0, [("<think>so<answer>Tol</answer>", None)]),
    (IN_WORLD, 0, [(SEARCH[0], "None left."), ANSWER]),
    (IN_WORLD, 0, [(ANSWER[0] + "<answer>x</answer>", None)]),
    (IN_WORLD, 0, [("<think>t</think>", None)]),
    (IN_WORLD[1:], 0, [("<think>t</think><search>q", "No action."), ANSWER]),
    # A turn without an action is only text.
    (IN_WORLD[1:], 1, [("Hm.", "No action."), ANSWER]),
  ],
)
def test_form_needs_closed_thoughts_answered_searches_and_one_answer(
  measures, formed, turns
):
  played = spoken.trajectory(aj.Question("q", "which?", ("Tol",)), *turns)
  for measure in measures:
    assert measure(played)["well_formed"] == formed
  cut = dataclasses.replace(played, outcome=aj.Outcome.TRUNCATED)
  assert research.measure(cut) == {"well_formed": 0}


QUERY = ("so <|begin_of_query|>q<|end_of_query|>", SEARCH[1])
LAST = ("so</think> <answer>Tol</answer>", None)
AID = QUERY[0], (spoken.passage("1", "Aid", "an assistant"),)
MARKED = "</think><answer>end_of_query begin_of_query</answer>", None


@pytest.mark.parametrize(
  ("searched", "structured", "formed", "turns"),
  [
    (0, 1, 1, [LAST]),
    (1, 1, 1, [QUERY, LAST]),
    (1, 1, 1, [QUERY, QUERY, LAST]),
    (0, 0, 0, [("<think>" + LAST[0], None)]),
    (0, 0, 0, [("so <answer>Tol</answer>", None)]),
    (0, 0, 0, [(LAST[0] + "<answer>x</answer>", None)]),
    (0, 1, 0, [QUERY, (QUERY[0], "No search is left."), LAST]),
    (0, 1, 0, [(QUERY[0], ()), LAST]),  # Nothing was found.
    (0, 1, 1, [("Hm.", "No action."), LAST]),
    (0, 1, 0, [("The Assistant: " + LAST[0], None)]),
    (1, 1, 0, [AID, LAST]),
    (0, 1, 0, [(CHINESE + LAST[0], None)]),
    (0, 1, 1, [(f"</think><answer>{'a ' * 10}</answer>", None)]),
    (0, 1, 0, [(f"</think><answer>{'a ' * 11}</answer>", None)]),
    (1, 1, 0, [QUERY, MARKED]),
  ],
)
def test_r1_searcher_reads_the_response_as_its_reward_servers_do(
  searched, structured, formed, turns
):
  played = spoken.trajectory(
    aj.Question("q", "which?", ("Tol",)),
    *turns,
    observation=lambda passages: r1_searcher.SEARCH.observation(passages, ()),
  )
  found = r1_searcher.measure(played)
  read = [found[x] for x in ("searched", "structured", "well_formed")]
  assert read == [searched, structured, formed]


@pytest.mark.parametrize(
  ("answer", "accepted", "contained", "f1"),
  [
    ("True", ["yes"], 1, 1.0),
    ("true", ["yes"], 0, 0.0),
    ("no", ["no one", "False"], 1, 1.0),
    ("yes it is", ["yes"], 1, 0.0),
    ("Austen, Jane", ["Jane Austen"], 1, 1.0),
    ("Jane_Austen-Leigh", ["the Jane Austen"], 1, 0.8),
    ("Emma", ["Emma Wood", "Tol"], 0, 2 / 3),
    ("", ["the"], 1, 0.0),
  ],
)
def test_r1_searcher_compares_words_in_any_order(
  answer, accepted, contained, f1
):
  text = f"</think><answer>{answer}</answer>"
  question = aj.Question("q", "which?", tuple(accepted))
  found = r1_searcher.measure(spoken.trajectory(question, (text, None)))
  assert found["contained"] == contained
  assert found["answer_f1"] == pytest.approx(f1)


@pytest.mark.parametrize(
  ("text", "expected"),
  [
    (r"<answer>It is \boxed{a {b} c}.</answer>", "a {b} c"),
    (r"<answer>\boxed{}</answer>", ""),
    (r"\boxed{a}<answer>b</answer>", None),
    (r"<answer>\boxed{a", None),
  ],
)
def test_the_answer_of_research_is_the_box_of_the_answer_block(text, expected):
  assert research.answer([aj.Span(aj.Author.MODEL, text)]) == expected
