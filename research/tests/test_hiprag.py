"""HiPRAG: its reward by hand, its form, and a judge behind a server."""

from __future__ import annotations

import asyncio
import dataclasses

import fake_openai
import pytest
import small_run
import small_systems
import spoken

import anysearch_jax as aj
from research import methods, study
from research.methods import hiprag

CONFIG = hiprag.Options()
QUESTION = aj.Question("q", "which?", ("Tol",))
SEARCHED = (
  "<step><reasoning>a</reasoning><search>mouth of the {0}</search>",
  (spoken.passage("1", "Tol", "a <b> river, 1 < 2"),),
)
CONCLUDED = "It is the {0}.</conclusion></step>"
KNOWN = (
  "<step><reasoning>I know {0}</reasoning>"
  "<conclusion>so {0}</conclusion></step>"
)
ANSWER = "</think><answer>Tol</answer>"


def played(*turns, question=QUESTION):
  return spoken.trajectory(
    question,
    *turns,
    observation=lambda passages: hiprag.SEARCH.observation(passages, ()),
  )


def search(text, *, before="", after=""):
  opening, found = SEARCHED
  return [
    (before + opening.format(text), found),
    (CONCLUDED.format(text) + after, None),
  ]


GOOD = search("Tol", before="<think>", after=KNOWN.format("sea") + ANSWER)
# A search that was refused has no context.
(OPENED, _), CLOSED = search("x", before="<think>", after=ANSWER)
REFUSED = [(OPENED, "No search is left.\n"), CLOSED]


@pytest.mark.parametrize(
  ("formed", "turns"),
  [
    (1, GOOD),
    (1, [("<think>" + KNOWN.format("x") + ANSWER, None)]),
    (0, [("<think>" + ANSWER, None)]),
    (0, [("<answer>Tol</answer>", None)]),
    (1, [("Hm. <think>" + KNOWN.format("x") + " so" + ANSWER, None)]),
    (1, [("<think>" + KNOWN.format("a < b") + "\n " + ANSWER + "\n", None)]),
    (0, [("<think>" + KNOWN.format("x") + "<step>" + ANSWER, None)]),
    (0, [("<think>" + KNOWN.format("x") + " ".join(ANSWER), None)]),
    (0, [("<think>" + KNOWN.format("</step>") + ANSWER, None)]),
    (0, [(f"<think><step>{KNOWN.format('x')}{ANSWER}", None)]),
    (0, [("<think>" + KNOWN.format("x") + ANSWER + " so", None)]),
    (0, [("<think>" + KNOWN.format("x") + "</think> so" + ANSWER[8:], None)]),
    (0, [(GOOD[0][0].replace("mouth of the Tol", " "), GOOD[0][1]), GOOD[1]]),
    (1, [("<think>" + KNOWN.format("<step>") + ANSWER, None)]),
    (0, search("Tol", before="<think>", after=ANSWER)[1:]),
    (0, [*GOOD, ("<answer>x</answer>", None)]),
    (0, REFUSED),
  ],
)
def test_form_is_steps_and_an_answer(formed, turns):
  assert hiprag.form(played(*turns).spans, budget=4, searches=0) == formed


def test_reading_a_long_response_takes_linear_time():
  text = "<think>" + "<step><reasoning>" * 3000 + "<conclusion>" * 3000
  for each in (text, "<step>" * 60_000, "<think>" + "<step></step>" * 20_000):
    assert hiprag.form(played((each + ANSWER, None)).spans) == 0


@pytest.mark.parametrize(
  ("answer", "gold", "right"),
  [
    *(("Tolkien", "the Tol", 1), ("a_tol", "Tol.", 1), ("Nil", "Tol", 0)),
    *(("Nil", "the", 1), ("", "the", 0), ("a<answer>Tol", "a answer Tol", 1)),
  ],
)
def test_a_right_answer_holds_an_accepted_one_anywhere(answer, gold, right):
  text = f"<answer>Tol</answer><answer>{answer}</answer>"
  assert hiprag._contained(text, (gold,)) == right


def judge(server, **values):
  config = dataclasses.replace(
    CONFIG, url=server.url, name="judge", deadline=5.0, **values
  )
  return hiprag.Judge(config, hiprag.WORDINGS["hiprag"].texts().values)


def replies(asked, *, wrong=()):
  """Answers like a model that knows only the mouth of the Tol."""

  def reply(body):
    text = body["messages"][0]["content"]
    asked.append((body["model"], text))
    if text.startswith("Answer from memory"):
      said = "the Tol" if "mouth of the Tol" in text else "nothing"
    elif text.startswith("Do these two texts"):
      said = "Yes." if "text: the Tol" in text else "NO"
    else:
      said = "YES" if any(word in text for word in wrong) else "no"
    message = {"role": "assistant", "content": said}
    return 200, {"choices": [{"index": 0, "message": message}]}

  return reply


def test_a_search_is_optimal_unless_memory_says_the_same():
  asked = []
  trajectory = played(
    *search("Tol", before="<think>"),
    *search("Nil", after=KNOWN.format("sea") + KNOWN.format("hill") + ANSWER),
  )
  with fake_openai.served(replies(asked, wrong=["hill"])) as server:
    tested = judge(server, memory_name="policy")
    found = asyncio.run(tested.measure(trajectory))
  # Needless, needed, right from memory, wrong from memory.
  assert found == {"contained": 1.0, "optimal": 2 / 4}
  models = [model for model, _ in asked]
  assert models.count("policy") == 2 and models.count("judge") == 4


@pytest.mark.parametrize(
  ("turns", "optimal"),
  [
    # One search, which is needed; a step that is right.
    (search("Nil", before="<think>", after=KNOWN.format("sea") + ANSWER), 2.0),
    ([("<think>" + KNOWN.format("hill") + ANSWER, None)], 1.0),
    (
      [(KNOWN.format("hill").removeprefix("<step><reasoning>") + ANSWER, None)],
      1,
    ),
  ],
)
def test_the_released_code_divides_by_the_searches(turns, optimal):
  with fake_openai.served(replies([], wrong=["hill"])) as server:
    tested = judge(server, by_search=True)
    tested._texts = {**tested._texts, "prefill": "\n<think>\n<step><reasoning>"}
    found = asyncio.run(tested.measure(played(*turns)))
  assert found == {"contained": 1.0, "optimal": optimal}


@pytest.mark.parametrize(
  "turns",
  [
    [("<answer>Tol</answer>", None)],
    [("<think>" + KNOWN.format("x") + "</think><answer>Nil</answer>", None)],
  ],
)
def test_wrong_or_malformed_responses_are_not_judged(turns):
  with fake_openai.served({}, status=500) as server:
    found = asyncio.run(judge(server).measure(played(*turns)))
  assert found["optimal"] == 0 and not server.asked


def test_a_judge_that_fails_fails_the_trajectory():
  name = methods.method_name("hiprag")
  config = aj.ExperimentConfig(
    method=aj.config.MethodConfig(
      name, options=("url=http://127.0.0.1:9",), measure_deadline=5.0
    ),
    episode=aj.config.EpisodeConfig(prompts="search_r1_world"),
  )
  with fake_openai.served({}, status=400) as server:
    measure = judge(server).measure
    values, reasons = small_systems.measured(
      config, measure, {(0, 0): played(*GOOD), (0, 1): played(("so", None))}
    )
  assert values == {(0, 1): {"contained": 0.0, "optimal": 0.0}}
  assert "It was not measured" in reasons[0, 0]


FACTS = [
  {"entity": "kel", "relation": "mayor", "alternative": "head", "known": True},
  {"entity": "nir", "relation": "born", "alternative": None, "known": False},
]


@pytest.mark.parametrize(
  ("queries", "optimal"),
  [
    ((), 0.5),
    (("nir born",), 1.0),
    (("kel head", "nir born"), 0.5),
    (("kel mayor",), 0.0),
    (("kel born", "nir mayor"), 0.5),
  ],
)
def test_in_the_world_unknown_facts_are_to_be_searched(queries, optimal):
  question = dataclasses.replace(QUESTION, metadata={"facts": FACTS})
  turns = [(f"<search>{query}</search>", ()) for query in queries]
  trajectory = spoken.trajectory(
    question, *turns, ("<answer>Tol</answer>", None)
  )
  found = hiprag.by_script(trajectory)
  assert found == {"contained": 1.0, "optimal": optimal}


def test_a_language_model_gets_a_judge_and_the_world_a_script():
  config = study.load_config("research/methods/configs.py:hiprag:qwen2_5_7b")
  assert hiprag.METHOD.constants_of(config).url
  assert isinstance(hiprag.measurer(config).__self__, hiprag.Judge)
  own = ("url=http://a/v1", "name=b")
  named = aj.config.changed(config, method={"options": own})
  assert hiprag.train(named).method.options == own
  assert hiprag.measurer(small_run.CONFIG) is hiprag.by_script
