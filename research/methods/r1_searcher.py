"""R1-Searcher: first learn to search, then to answer with what was found.

    stage 1    answer if the answer holds the words of an accepted one,
               otherwise -answer; + formed if it thought and answered once;
               + searched if it searched and every search has passages
    stage 2    F1, minus malformed if the response is not well formed

Stage 1 is the first `stage_one` of the training. The policy searches between
markers of its own, in a response that the prompt opens with `<think>`. In the
generated world it is played in Search-R1's environment.
https://arxiv.org/abs/2503.05592
"""

from __future__ import annotations

import dataclasses
import pathlib
import re

import jax.numpy as jnp

import anysearch_jax as aj

SEARCH = aj.tools.search(
  "<|begin_of_query|>",
  "<|end_of_query|>",
  begins="<|begin_of_documents|>\n",
  ends="\n<|end_of_documents|>",
  layout="({rank}){title}   {text}",
)
_BEGIN, _END = "<|begin_of_documents|>", "<|end_of_documents|>"
_DOCUMENTS = re.compile(rf"{re.escape(_BEGIN)}.*?{re.escape(_END)}", re.S)
_HAN = re.compile("[\u4e00-\u9fff]")
_ASSISTANT = re.compile("[Aa]ssistant")
_LONGEST = 10  # Words of a well-formed answer.
_BOOLEANS = {"True": "yes", "False": "no"}


@dataclasses.dataclass(frozen=True)
class Options:
  """R1-Searcher's rewards in two stages."""

  stage_one: float = aj.settings.learning(0.16, aj.settings.SHARE)
  """Share of the training that is the first stage."""
  answer: float = aj.settings.learning(1.0, aj.settings.at_least(0))
  """In stage 1, reward of an answer with the words of an accepted one, and loss
  otherwise; 0 is the paper's."""
  formed: float = aj.settings.learning(0.5, aj.settings.at_least(0))
  """In stage 1, added if the response thought and answered once."""
  searched: float = aj.settings.learning(0.5, aj.settings.at_least(0))
  """In stage 1, added if it searched and each search has passages."""
  malformed: float = aj.settings.learning(2.0, aj.settings.at_least(0))
  """In stage 2, subtracted if the response is not well formed."""


def _normalized(text: str) -> str:
  return aj.official_scoring.trivia(_BOOLEANS.get(text, text))


_SCORES = aj.official_scoring.by_words(_normalized, aj.official_scoring.closed)


def action(text: str) -> aj.protocol.Action | None:
  """Returns the last search, without double quotes, or answer of a turn."""
  found = aj.tools.action((SEARCH,))(text)
  if found is None or found.kind is aj.protocol.ActionKind.ANSWER:
    return found
  query = " ".join(found.content.replace('"', "").split())
  return dataclasses.replace(found, content=query)


WORDINGS = aj.search_r1.wordings(
  "r1_searcher",
  folder=pathlib.Path(__file__).with_name("texts"),
  tools=(SEARCH,),
  stops=(SEARCH.closes, "</answer>"),
  action=action,
  format=None,
)


def measure(trajectory: aj.Trajectory) -> dict[str, float]:
  """Returns what the authors' two reward servers read of a response.

  contained: the answer has every word of an accepted one.
  answer_f1: of the answer, whose True and False are yes and no.
  searched: it searched, and each query is followed by passages.
  structured: it closed the thought that the prompt opened, and answered once.
  well_formed: the form of stage 2.
  """
  said = "".join(span.text for span in trajectory.spans)
  *marks, opened, thoughts, begun, ended = (
    said.count(text)
    for text in (
      *(SEARCH.opens, SEARCH.closes, _BEGIN, _BEGIN + "\n", f"{_BEGIN}\n(1)"),
      *(_END, _END + "\n\n"),
      *("<think>", "</think>", "<answer>", "</answer>"),
    )
  )
  answer = said.split("<answer>")[-1].split("</answer>")[0].strip()
  paired = len({*marks}) == 1
  structured = opened == 0 and thoughts == begun == ended == 1
  formed = (
    structured
    and paired
    and not _ASSISTANT.search(said)
    and "begin_of_query" not in answer
    and "begin_of_documents" not in answer
    and len(answer.split()) <= _LONGEST
    and not _HAN.search(_DOCUMENTS.sub("", said))
  )
  found = {
    "searched": float(paired and marks[0] >= 1),
    "structured": float(structured),
    "well_formed": float(formed),
  }
  return found | _scored(answer if begun and ended else None, trajectory)


def _scored(answer: str | None, trajectory: aj.Trajectory) -> dict[str, float]:
  """Returns `contained` and `answer_f1`, the best over the accepted answers."""
  accepted = trajectory.question.golden_answers
  if answer is None or not accepted:
    return {"contained": 0.0, "answer_f1": 0.0}
  words = {*_normalized(answer).split(" ")}
  return {
    "contained": float(
      any(words.issuperset(_normalized(x).split(" ")) for x in accepted)
    ),
    "answer_f1": max(_SCORES.f1(answer, x) for x in accepted),
  }


def in_world(trajectory: aj.Trajectory) -> dict[str, float]:
  """Measures a response in Search-R1's environment, as `measure` does."""
  said = "".join(aj.scoring.turns(trajectory.spans))
  tags = ("think", "search", "answer")
  counts = {x: said.count(f"<{x}>") for x in tags}
  closed = all(said.count(f"</{x}>") == counts[x] for x in tags)
  formed = closed and counts["think"] >= 1 and counts["answer"] == 1
  formed = formed and counts["search"] == trajectory.searches
  return {
    "searched": float(formed and trajectory.searches > 0),
    "structured": float(formed),
    "well_formed": float(formed),
    **_scored(aj.protocol.extract_answer(trajectory.spans), trajectory),
  }


def measurer(config: aj.ExperimentConfig) -> aj.method.Measure:
  """Returns what measures a run's trajectories."""
  return in_world if config.data.source == "world" else measure


@aj.method.jitted
def reward(o: aj.Outcomes, c: Options) -> aj.method.Terms:
  """Returns the reward of the `stage`, 1 or 2, that the training is in."""
  m = o.measures
  first = (
    c.answer * (2 * m["contained"] - 1)
    + c.formed * m["structured"]
    + c.searched * m["searched"]
  )
  second = m["answer_f1"] - c.malformed * (1 - m["well_formed"])
  begins = o.progress.share < c.stage_one
  return {
    "f1": m["answer_f1"],
    "well_formed": m["well_formed"],
    "stage": jnp.where(begins, 1, 2) + 0 * m["answer_f1"],
    "total": jnp.where(begins, first, second),
  }


METHOD = aj.method.compared(
  "r1_searcher",
  "R1-Searcher",
  WORDINGS,
  reward,
  measures=("contained", "answer_f1", "searched", "structured", "well_formed"),
  measure=measure,
  measurer=measurer,
  options=Options(),
)
