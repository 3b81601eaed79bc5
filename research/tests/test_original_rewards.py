"""Rewards of the systems against their authors' functions, which are executed.

For each checkout in `ANYSEARCH_ORIGINALS`, 500 episodes of random turns are
played in the system's environment and scored by both. A difference counts as
explained if the predicate of a row of configs/fidelity_rules.csv holds.

To add a system, add its authors' module and function to `AUTHORS`, pieces of
its turns to `PIECES`, and its rows' predicates to `RULES`.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import inspect
import io
import random
import re
import sys
import textwrap
import types
from unittest import mock

import numpy as np
import pytest
import scripted
from test_originals import checkout

import anysearch_jax as aj
from research import methods, originals

GROUP, GROUPS = 5, 100
WORDS = "Jane Austen the Emma art party no yes 1815 a novel , ! Bath".split()
ALIASES = [("Jane Austen", "Austen"), ("art",), ("yes",), ("Emma", "the novel")]
TEXTS = (
  *("Jane Austen wrote Emma.", "Emma is a novel of 1815.", "A party in Bath."),
  *("An art, no more.", "yes or no", "Austen lived in Bath and Chawton."),
)
# Titles of one letter, because StepSearch's authors compare texts alone.
PASSAGES = [aj.Passage(str(i), "t", text) for i, text in enumerate(TEXTS)]
KEYS = (("who wrote Emma", "Emma author"), ("Jane Austen Bath",))
GOLD = [{"title": "t", "text": x, "paragraph_text": x} for x in TEXTS[:2]]
ON = types.SimpleNamespace(
  information_gain=True,
  search_steps_reward=True,
  redundancy_penalty=True,
  search_key_reward=True,
)
LENGTHS = {"length_limit": 150, "length_tolerance": 100}
# What the authors' modules import and their rewards do not use.
UNUSED = (
  *("datasets", "ujson", "openai", "tensordict", "verl.protocol", "openrlhf"),
  *("openrlhf.utils", "openrlhf.utils.logging_utils", "lcb_runner"),
  *("lcb_runner.evaluation", "utils.math_equivalence"),
)


def imported(folder, name):
  """Imports a module of a checkout without its packages' own __init__."""
  root, *path = name.split(".")[:-1]
  kept = {k: m for k, m in sys.modules.items() if k.split(".")[0] == root}
  try:
    for known in kept:
      del sys.modules[known]
    for i in range(len(path) + 1):
      package = types.ModuleType(".".join((root, *path[:i])))
      package.__path__ = [str(folder.joinpath(root, *path[:i]))]
      package.DataProto = None
      sys.modules[package.__name__] = package
    sys.modules.update({each: mock.MagicMock() for each in UNUSED})
    return importlib.import_module(name)
  finally:
    for each in UNUSED:
      sys.modules.pop(each, None)
    for known in [k for k in sys.modules if k.split(".")[0] == root]:
      del sys.modules[known]
    sys.modules.update(kept)


def response(t):
  return "".join(span.text for span in t.spans)


def whole(t):
  """Search-R1's functions see the prompt too, with one example answer."""
  return "<answer> Beijing </answer>" + response(t)


def target(t):
  return {"target": list(t.question.golden_answers), "search_keys": KEYS}


def anysearch(module, group):
  samples = [
    module.RewardSample(
      response(t),
      t.question.golden_answers,
      t.budget,
      int(t.generated_tokens),
      t.searches,
      scaffold=t.scaffold,
    )
    for t in group
  ]
  found = module.score_group(samples, module.RewardConfig(**LENGTHS))
  return [each.total for each in found]


def zerosearch(module, t):
  if module.extract_solution(whole(t)) is None:
    return 0  # The authors' function raises: the row "missing answer".
  return module.compute_score(whole(t), target(t))[1]


def autorefine(module, t):
  how = {"refine_score": 0.1, "score_func": module.compute_f1_scores}
  return module.compute_reward(whole(t), response(t), target(t), **how)


def research(module, t):
  end = "<|im_end|>" * (t.outcome.value == "answered")
  text = f"<|im_start|>assistant\n{response(t)}{end}"
  tokenizer = types.SimpleNamespace(eos_token="<|im_end|>")
  return module.compute_score(tokenizer, text, target(t)["target"])[0]


def stepsearch(module, t):
  found = module.compute_score_f1_steps_plan_with_support_docs(
    types.SimpleNamespace(trainer=ON), response(t), target(t), support_docs=GOLD
  )
  return found["score"] + 0.6 * sum(found["step_scores"])


def r1_searcher(template):
  """Returns the rewards by a server, which knows one answer a question."""

  def scored(module, group):
    server = module.MathRuleProxy.__new__(module.MathRuleProxy)
    server.tokenizer = types.SimpleNamespace(pad_token="<pad>", eos_token="<e>")
    server.cnt, server.log_file = 0, None
    for t in group:
      best = []
      for server.eval_data_dict in ({"": x} for x in t.question.golden_answers):
        (found,) = server.get_reward([template.format(response(t))])
        best.append(np.ravel(found)[0])
      yield max(best)

  return lambda module, group: list(scored(module, group))


QWEN = "{{}}\n\nUser:?\nAssistant: <think>{}"
LLAMA = (
  "<|start_header_id|>user<|end_header_id|>\n\n?<|eot_id|>"
  "<|start_header_id|>assistant<|end_header_id|>\n\n<think>{}"
)


def judged(step):
  """Decides in place of a judge whether a step is optimal."""
  return len(step) % 2 == 0


def hiprag(module, t):
  async def is_not_optimal(step_content, *_, **__):
    return not judged(step_content)

  module.test_oversearch_direct_async = is_not_optimal
  module.test_undersearch_async = is_not_optimal
  return asyncio.run(module.compute_score_em(whole(t), target(t)))


def search_o1(module, t):
  accepted = t.question.golden_answers
  return module.evaluate_predictions(response(t), accepted, mode="qa")[0]["f1"]


def each(score):
  return lambda module, group: [score(module, t) for t in group]


SCORES = "verl.utils.reward_score"
# By system, the authors' module and the rewards of a group by its functions.
AUTHORS = {
  "anysearch": ("examples.anysearch.rewards", anysearch),
  "search_r1": (
    f"{SCORES}.qa_em",
    each(lambda module, t: module.compute_score_em(whole(t), target(t))),
  ),
  "zerosearch": (f"{SCORES}.qa_em", each(zerosearch)),
  "autorefine": (f"{SCORES}.qa_em", each(autorefine)),
  "research": (f"src.{SCORES}.re_search", each(research)),
  "stepsearch": (f"{SCORES}.qa_step", each(stepsearch)),
  "r1_searcher": ("train.reward_server_qwen_zero", r1_searcher(QWEN)),
  "r1_searcher stage 1": (
    "train.reward_server_llama_stage1",
    r1_searcher(LLAMA),
  ),
  "hiprag": (f"{SCORES}.qa_em_format", each(hiprag)),
  "search_o1": ("scripts.evaluate", each(search_o1)),
}
CHANGES = {"r1_searcher stage 1": {"method": {"options": ("stage_one=1.0",)}}}
PIECES = {
  "anysearch": ["<Answer>{}</ANSWER>", "<SEARCH>{}</Search>"] * 2,
  "autorefine": ["<refine>{}</refine>"] * 5,
  "research": ["\\boxed{{{}}}", "<answer>\\boxed{{{}}}</answer>"] * 3,
  "stepsearch": ["<plan>{}</plan>", "<observation>{}</observation>"],
}


def said(t):
  return [s.text for s in t.spans if s.author == aj.Author.MODEL]


def unclosed(t):
  """An answer's tags are not one block within one turn."""
  pairs = ([], ["<answer>", "</answer>"])
  return any(re.findall("</?answer>", turn) not in pairs for turn in said(t))


def within_a_word(t):
  """An accepted answer is within a word of a refinement: "art" in "party"."""
  refined = re.findall(r"<refine>(.*?)</refine>", response(t), re.DOTALL)
  text = aj.scoring.normalize_answer(" ".join(refined))
  accepted = map(aj.scoring.normalize_answer, t.question.golden_answers)
  return any(x in text and not aj.scoring.contains(text, [x]) for x in accepted)


def yes_or_no(t):
  """SQuAD's F1 counts words of "yes" and "no" answers too."""
  words = f"{t.question.golden_answers} {said(t)}"
  return re.search(r"\b(yes|no)\b", words) is not None


def bad_turn(t):
  return len(said(t)) != t.searches + (t.outcome.value == "answered")


def overwritten(t):
  """Two queries match the same key group, or one matches both."""
  return t.searches > 1 or any("Emma" in q and "Austen" in q for q in t.queries)


def nested(t):
  """A line has braces besides those of one box."""
  return any(
    line.count("{") + line.count("}") > 2 for line in response(t).splitlines()
  )


def refused(t):
  return "".join(said(t)).count("<search>") != t.searches


def labelled(t):
  """A passage precedes another one, whose number is read as its end."""
  return any(len(shown.passages) > 1 for shown in t.observations)


# By system, when the rule of a row of fidelity_rules.csv makes a difference.
RULES = {
  "autorefine": {"refinement": within_a_word, "F1": yes_or_no},
  "research": {
    "F1": yes_or_no,
    "a search beyond the budget or a turn without an action": bad_turn,
  },
  "stepsearch": {
    "search keys": overwritten,
    "refused queries": refused,
    "passages": labelled,
  },
  "search_o1": {"box": nested},
}


def steps(draw, some, first):
  """Returns a turn of HiPRAG, well formed two times in three."""
  known = "<step><reasoning>{}</reasoning><conclusion>{}</conclusion></step>"
  text = "<think>" if first else f"{some(3)}</conclusion></step>"
  for _ in range(draw.randint(0, 2)):
    text += known.format(some(3), some(3))
  if draw.random() < 0.5:
    text += f"<step><reasoning>{some(2)}</reasoning><search>{some(2)}</search>"
  else:
    answer = draw.choice((some(3), *draw.choice(ALIASES)))
    text += f"</think> <answer>{answer}</answer>"
  if draw.random() < 0.15:
    places = [m.start() for m in re.finditer("<|$", text)]
    at = draw.choice(places)
    pieces = ("x", "<b>", "<step>", "</step>", "<think>", "<conclusion>")
    text = text[:at] + draw.choice(pieces) + text[at:]
  return text


def marks(draw, some):
  """Returns a turn of R1-Searcher, some of them malformed."""
  more = (
    "<think>",
    "</think>",
    "the Assistant",
    "\u4e2d",
    "<answer>x</answer>",
  )
  text = some(3) + draw.choice(more) * (draw.random() < 0.15)
  answer = draw.choice((some(3), some(20), "True", *draw.choice(ALIASES)))
  given = f"</think>\n<answer> {answer} </answer>"
  query = f'<|begin_of_query|>"{some(2)}"<|end_of_query|>'
  return text + draw.choice((query, given, given, "<answer>begin_of_query"))


def boxes(draw, some):
  """Returns a turn of Search-o1."""
  query = f"<|begin_search_query|>{some(2)}<|end_search_query|>"
  given = draw.choice((some(3), "(yes)", *draw.choice(ALIASES)))
  more = f"\\boxed{{\\text{{{given}}}}}", f"\\boxed{{{given}}} {{x}}"
  box = f"\\boxed{{{given}}}"
  return some(3) + draw.choice((query, query, box, box, box, *more))


def turn(draw, system, first=False):
  def some(most):
    return " ".join(draw.choices(WORDS, k=draw.randint(0, most)))

  match system.split():
    case ["hiprag"]:
      return steps(draw, some, first)
    case ["r1_searcher", *_]:
      return marks(draw, some)
    case ["search_o1"]:
      return boxes(draw, some)
  pieces = ["<think>{}</think>"] * 2
  pieces += ["{}", "<answer>{}</answer>", "</answer>", *PIECES.get(system, ())]
  text = "<think>so</think>" * (draw.random() < 0.8)
  if draw.random() < 0.4:
    text += draw.choice(pieces).format(some(3))
  query = draw.choice((*KEYS[0], *KEYS[1], some(2)))
  given = draw.choice((some(3), *draw.choice(ALIASES)))
  given = f"\\boxed{{{given}}}" if system == "research" else given
  actions = (f"<search>{query}</search>", f"<answer>{given}</answer>", some(2))
  return text + draw.choice(actions)


def played(system, config, seed):
  """Plays a group of one question and budget."""
  draw = random.Random(seed)
  engine = scripted.Engine(
    lambda request: turn(draw, system, first=request.turn == 0)
  )

  class Retriever:
    async def search(self, request):
      return draw.sample(PASSAGES, draw.choice((1, 1, 3)))

  metadata = {"supporting": GOLD, "search_keys": KEYS}
  how = {
    "question": aj.Question("q", "?", draw.choice(ALIASES), metadata=metadata),
    "budget": draw.randint(0, 3),
    "scaffold": system == "anysearch" and seed % 2 == 0,
  }
  return [
    scripted.play(engine, Retriever(), config.episode, place=place, **how)
    for place in range(GROUP)
  ]


def ours(method, config, group):
  environment = aj.get_environment(config.episode.prompts)
  verdicts = [environment.judge(t) for t in group]
  measure = method.measurer(config) if method.measurer else method.measure
  values = [measure(t) for t in group]
  values = [asyncio.run(v) if inspect.iscoroutine(v) else v for v in values]
  columns = {
    "em": [v.em for v in verdicts],
    "f1": [
      aj.scoring.f1(v.answer, t.question.golden_answers)
      for v, t in zip(verdicts, group)
    ],
    "format": [v.format or 0 for v in verdicts],
    "answered": [v.answer is not None for v in verdicts],
    "valid": [True] * len(group),
  }
  for name in ("generated_tokens", "searches", "violation"):
    columns[name] = [getattr(t, name) for t in group]
  if method.reward is None:
    return columns["f1"]
  outcomes = aj.Outcomes(
    **{name: np.array([column]) for name, column in columns.items()},
    budget=np.array([group[0].budget]),
    measures={m: np.array([[v[m] for v in values]]) for m in method.measures},
  )
  constants = method.constants_of(config)
  total = np.array(method.reward(outcomes, constants)["total"][0], float)
  if method.steps:
    total += [np.sum(method.steps(t, constants)) for t in group]
  return total


@pytest.mark.parametrize("case", sorted(AUTHORS))
def test_rewards_equal_those_of_the_authors_functions(case, monkeypatch):
  async def optimal(self, step):
    return judged(step)

  name, score = AUTHORS[case]
  system = case.split()[0]
  if system == "hiprag":
    # The class of the file that `get_method` loads.
    loaded = aj.get_method(methods.method_name(system)).measurer.__globals__
    monkeypatch.setattr(loaded["Judge"], "_optimal", optimal)
  module = imported(checkout(system), name)
  config = originals.recipe(system)
  changes = {"reward": LENGTHS, **CHANGES.get(case, {})}
  config = aj.config.changed(config, **changes)
  rules = {"answer": unclosed, **RULES.get(system, {})}
  explained, unexplained = 0, []
  for seed in range(GROUPS):
    group = played(system, config, seed)
    mine = ours(aj.get_method(methods.method_name(system)), config, group)
    with contextlib.redirect_stdout(io.StringIO()):  # They print samples.
      theirs = score(module, group)
    for t, a, b in zip(group, mine, theirs, strict=True):
      # AnySearch's weight of the tool reward is the group's.
      concerned = group if system == "anysearch" else [t]
      if abs(a - b) < 2e-4:  # StepSearch rounds F1 to four digits.
        continue
      if any(rule(x) for rule in rules.values() for x in concerned):
        explained += 1
      else:
        unexplained.append((float(a), float(b), response(t)))
  print(f"{case}: {explained} of {GROUP * GROUPS} differ as documented")
  assert not unexplained, (len(unexplained), unexplained[0])
  documented = {
    row["text or rule"] for row in originals.rows("fidelity_rules", system)
  }
  assert rules.keys() - {"answer"} <= documented


def test_search_o1_numbers_the_steps_as_its_authors_do():
  script = checkout("search_o1") / "scripts/run_search_o1.py"
  code = script.read_text("utf-8")
  code = code[code.index("all_reasoning_steps = seq") :]
  code = code[: code.index("# Collect parameters")]
  begins = ("<|begin_search_query|>", "<|begin_search_result|>")
  pieces = (
    "a",
    "\n",
    "\n\n",
    "...",
    "Step 1:",
    "<|end_search_result|>",
    *begins,
  )
  # No public name of the library.
  room = importlib.import_module("anysearch_jax.generative_retrieval.refining")
  draw = random.Random(0)
  for _ in range(500):
    text = "".join(draw.choices(pieces, k=draw.randint(0, 40)))
    names = dict(zip(("BEGIN_SEARCH_QUERY", "BEGIN_SEARCH_RESULT"), begins))
    names |= {"seq": {"output": text}}
    exec(textwrap.dedent(" " * 24 + code), names)  # noqa: S102
    expected = names["truncated_prev_reasoning"]
    assert room.reasoning(text, begins) == expected
