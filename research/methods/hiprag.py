"""HiPRAG: a bonus for steps that search if, and only if, they have to.

    right and well formed    1 + process * (share of steps that are optimal)
    right, malformed         1 - formed
    wrong, well formed       formed
    otherwise                0

A response is a sequence of steps, with a search or without one. The passages of
a search open the step's conclusion. A model from memory answers the query of
each search; if a judge finds that it says the same as the conclusion, the
search was needless. The judge also says whether a step without a search is
right. Both are servers with OpenAI's interface, asked while a rollout is
scored. In the generated world a script knows: a fact is to be searched unless
the policy knows it. https://arxiv.org/abs/2510.07794
"""

from __future__ import annotations

import asyncio
import dataclasses
import pathlib
import re
import string
from collections.abc import Mapping, Sequence

import jax.numpy as jnp

import anysearch_jax as aj


@dataclasses.dataclass(frozen=True)
class Options:
  """HiPRAG's reward, and the servers that judge steps."""

  formed: float = aj.settings.learning(0.2, aj.settings.SHARE)
  """Reward of a well-formed response; a right answer in a malformed one loses
  it."""
  process: float = aj.settings.learning(0.4, aj.settings.at_least(0))
  """Bonus of a right answer if all steps are optimal."""
  by_search: bool = aj.settings.learning(False)
  """Whether optimal steps are divided by the number of searches, as in the
  released code, where the share can exceed 1 and is 1 without a search; False:
  by the number of steps, the paper's share."""
  url: str = aj.settings.learning("")
  """Address of the judge (an OpenAI chat completions API)."""
  name: str = aj.settings.learning("")
  """Name of the judge's model."""
  memory_url: str = aj.settings.learning("")
  """Address of the model that answers queries from memory; "": the judge's."""
  memory_name: str = aj.settings.learning("")
  """Name of that model; "": the judge's."""
  key_variable: str = aj.settings.learning("")
  """Environment variable with the key of both addresses; "": none."""
  max_tokens: int = aj.settings.learning(200, aj.settings.at_least(1))
  """Limit on the tokens of a reply."""
  concurrency: int = aj.settings.learning(64, aj.settings.at_least(1))
  """Concurrent calls to an address."""
  deadline: float = aj.settings.learning(60.0, aj.settings.POSITIVE)
  """Seconds of a call."""


def _observation(
  passages: Sequence[aj.Passage], unwanted: Sequence[str]
) -> str:
  """Returns the passages, and the opening mark of the step's conclusion."""
  shown = aj.protocol.observation(
    passages, unwanted, begins="<context>", ends="</context>"
  )
  return f"\n    {shown.strip()}\n    <conclusion>"


SEARCH = dataclasses.replace(
  aj.tools.search(begins="<context>", ends="</context>"),
  observation=_observation,
)
_ADDRESS, _MODEL = "http://127.0.0.1:6002/v1", "Qwen/Qwen2.5-14B-Instruct"
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_SPACES = str.maketrans(dict.fromkeys(string.punctuation, " "))


def _blocks(text: str, name: str) -> tuple[list[str], bool]:
  """Returns the contents of `<name>` blocks, and whether all are closed."""
  found: list[str] = []
  end = 0
  while (start := text.find(f"<{name}>", end)) >= 0:
    start += len(name) + 2
    end = text.find(f"</{name}>", start)
    if end < 0:
      return found, False
    found.append(text[start:end])
  return found, True


def _steps(text: str) -> list[str]:
  """Returns the steps of a response, [] if it is not well formed.

  Its last thought has steps, text between them included, and one answer
  follows.
  """
  _, opened, response = text.rpartition("<think>")
  thoughts, closed, rest = response.partition("</think>")
  _, ended, after = rest.partition("</answer>")
  steps, whole = _blocks(thoughts, "step")
  formed = opened and closed and rest.lstrip().startswith("<answer>") and ended
  if not formed or after.strip() or not whole or not all(map(_is_step, steps)):
    return []
  return steps


def _is_step(step: str) -> bool:
  """Returns whether a step has its blocks in order, once, and no other tag."""
  searches = "<search>" in step.partition("</reasoning>")[2]
  around, end = "", 0
  for name in ("reasoning", *("search", "context") * searches, "conclusion"):
    start = step.find(f"<{name}>", end)
    around += step[end:start]
    close = step.find(f"</{name}>", start)
    if start < 0 or close < 0 or step.count(f"<{name}>") != 1:
      return False
    content = step[start + len(name) + 2 : close]
    if name in ("search", "context") and not content.strip():
      return False
    end = close + len(name) + 3
  around += step[end:]
  return not ("<" in around and ">" in around)


def form(spans: Sequence[aj.Span], **state: int) -> int:
  """Returns 1 if the response is thought steps and an answer, else 0."""
  del state
  return int(bool(_steps("".join(span.text for span in spans))))


def _contained(text: str, answers: Sequence[str]) -> bool:
  """Returns whether the last answer of a response holds an accepted one.

  It may be within a word, as in the authors' code.
  """

  def normalized(text: str) -> str:
    text = _ARTICLES.sub(" ", text.lower()).translate(_SPACES)
    return " ".join(text.split())

  given = (_blocks(text, "answer")[0] or [""])[-1].strip()
  found = normalized(given)
  return bool(given) and any(normalized(each) in found for each in answers)


WORDINGS = aj.search_r1.wordings(
  "hiprag",
  {
    "memory": aj.wording.Slots(needs=("query",)),
    "same": aj.wording.Slots(needs=("conclusion", "memory")),
    "wrong": aj.wording.Slots(needs=("step",)),
  },
  folder=pathlib.Path(__file__).with_name("texts"),
  tools=(SEARCH,),
  format=form,
  markers=aj.protocol.tags(("step", "reasoning", "conclusion")),
)


class Judge:
  """Measures trajectories by asking servers.

  `texts` are what the servers are asked, see `WORDINGS`.

  Raises:
    ValueError: an address is invalid, or the key is missing.
  """

  def __init__(self, config: Options, texts: Mapping[str, str]):
    self._config, self._texts = config, texts
    self._judge, self._memory = (
      aj.openai_endpoint.OpenAIEndpoint(
        url,
        "/chat/completions",
        key_variable=config.key_variable,
        deadline=config.deadline,
        concurrency=config.concurrency,
      )
      for url in (config.url, config.memory_url or config.url)
    )

  async def measure(self, trajectory: aj.Trajectory) -> dict[str, float]:
    """Returns `contained`, whether the answer holds one, and `optimal`.

    The servers are asked about right and well-formed responses only; `optimal`
    is 0 for the others. Raises aj.RetrievalError if a server gave no reply
    in time.
    """
    said = "".join(span.text for span in trajectory.spans)
    said = self._texts.get("prefill", "") + said
    right = _contained(said, trajectory.question.golden_answers)
    steps = _steps(said) if right else []
    counted = len(steps)
    if self._config.by_search:
      counted = sum("<search>" in step for step in steps)
    optimal = float(bool(steps))
    if counted:
      good = await asyncio.gather(*(self._optimal(step) for step in steps))
      optimal = sum(good) / counted
    return {"contained": float(right), "optimal": optimal}

  async def _optimal(self, step: str) -> bool:
    if "<search>" not in step:
      return not await self._says("wrong", step=f"<step>{step}</step>")
    (query,), (conclusion,) = (
      _blocks(step, name)[0] for name in ("search", "conclusion")
    )
    c = self._config
    memory = await self._asked(
      self._memory, c.memory_name or c.name, "memory", query=query
    )
    return not await self._says("same", conclusion=conclusion, memory=memory)

  async def _says(self, name: str, **values: str) -> bool:
    reply = await self._asked(self._judge, self._config.name, name, **values)
    return reply.strip().lower().startswith("yes")

  async def _asked(
    self,
    server: aj.openai_endpoint.OpenAIEndpoint,
    model: str,
    name: str,
    **values: str,
  ) -> str:
    reply, _ = await server.chat(
      model,
      self._texts[name].format(**values),
      max_tokens=self._config.max_tokens,
      temperature=0.0,
    )
    return reply


def by_script(trajectory: aj.Trajectory) -> dict[str, float]:
  """Returns the measures of `Judge` in the generated world, without a server.

  A step is a fact of the question. It is optimal if it was searched and is not
  known, or known and not searched.
  """
  queries = [set(query.split()) for query in trajectory.queries]
  facts = trajectory.question.metadata.get("facts") or ()
  optimal = [
    bool(fact.get("known"))
    != any(
      fact["entity"] in words
      and words & {fact["relation"], fact.get("alternative")}
      for words in queries
    )
    for fact in facts
  ]
  share = sum(optimal) / len(optimal) if optimal else 1.0
  return {**aj.method.contained(trajectory), "optimal": share}


def measurer(config: aj.ExperimentConfig) -> aj.method.Measure:
  """Returns what measures a run's trajectories; raises as `Judge`."""
  if config.data.source == "world":
    return by_script
  own = config.episode.prompts.rpartition("#")[2] == "hiprag"
  texts = WORDINGS["hiprag"].texts(config.episode.prompt_file if own else "")
  return Judge(METHOD.constants_of(config), texts.values).measure


def train(config: aj.ExperimentConfig) -> aj.ExperimentConfig:
  """Selects a fixed budget, and names a judge if there is none."""
  config = aj.method.fixed_budget(config)
  if config.data.source == "world" or METHOD.constants_of(config).url:
    return config
  judged = (*config.method.options, f"url={_ADDRESS}", f"name={_MODEL}")
  return aj.config.changed(config, method={"options": judged})


@aj.method.jitted
def reward(o: aj.Outcomes, c: Options) -> aj.method.Terms:
  """Returns the reward of the table above."""
  contained, optimal = (o.measures[x] for x in ("contained", "optimal"))
  formed = o.format != 0
  right = jnp.where(formed, 1 + c.process * optimal, 1 - c.formed)
  wrong = jnp.where(formed, c.formed, 0)
  return {
    "contained": contained,
    "optimal": optimal,
    "total": jnp.where(contained != 0, right, wrong),
  }


METHOD = aj.method.compared(
  "hiprag",
  "HiPRAG",
  WORDINGS,
  reward,
  measures=("contained", "optimal"),
  train=train,
  measurer=measurer,
  options=Options(),
)
