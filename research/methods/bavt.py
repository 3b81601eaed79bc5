"""BAVT, inference only: a tree of steps, of which the policy is the critic.

A node is an episode after a step: a search with what it showed, or an answer.
After every step the policy is asked how much the step achieved, d in [-4, 4].
In the generated world a script reads the step. The node has the value V + d/10,
where V is that of the node before. While the share r of the budget is left, the
node to continue is drawn in proportion to V^(1/r). What other branches and the
critic spent stays charged. https://arxiv.org/abs/2603.12634

No code is public; fidelity_rules.csv lists what is ours.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

import anysearch_jax as aj

MOST = 4.0
# Values of the root and of the worst node, and that of an answer to accept.
START, LEAST, SURE = 0.5, 0.1, 0.8
# With a smaller share of the budget, the best node is continued to its end.
BACKSTOP = 0.2
_MOST_TOKENS = 512  # Of a turn of the critic.
_DELTA = re.compile(r'"delta"\s*:\s*"?([-+]?\d+)')
_ASKED = re.compile(r"<search>\s*(\S+) (\S+)\s*</search>")
_SHOWN = re.compile(r"\(Title: (\S+?) ?\) (\S+) (\S+)")


class Critic(NamedTuple):
  """Values the steps of an episode.

  progress: returns a step's progress in [-4, 4] from the policy's reply to
    `asks`; from the step's own text, if that is "".
  asks: text that asks the policy.
  """

  progress: Callable[[str], float]
  asks: str = ""


class Tree(NamedTuple):
  """The episodes that may be continued, with their values.

  value: of the node that is continued.
  judged: the step that the critic is asked about.
  """

  nodes: tuple[tuple[aj.episode_state.Episode, float], ...]
  value: float
  judged: aj.episode_state.Episode | None = None


def progress(reply: str) -> float:
  """Returns the last delta of the critic's reply, 0 without one."""
  # A pattern and not a JSON parser, as in `bats_verify.accepted`.
  deltas = _DELTA.findall(reply)
  return max(-MOST, min(MOST, float(deltas[-1]))) if deltas else 0.0


def found(step: str) -> float:
  """Returns the progress of a step of the world: by values found, 0 for two."""
  asked = _ASKED.findall(step)
  values = {value for *of, value in _SHOWN.findall(step) if tuple(of) in asked}
  return {0: -MOST, 1: MOST}.get(len(values), 0.0) if asked else 0.0


def chances(values: np.ndarray, share: float) -> np.ndarray:
  """Returns the chances of nodes of these values, with 0 < share <= 1 left."""
  weights = (values / values.max()) ** (1 / share)
  return weights / weights.sum()


def step(
  waiting: aj.episode_state.Episode,
  event: aj.episode_state.Event | None,
  *,
  critic: Critic,
) -> aj.episode_state.Episode:
  """Advances an episode as `episode.step` does, or its tree.

  Args:
    waiting: its `memory` is the tree, None if it does not branch, or no longer.
    event: the answer to its request; None if its time is over.
    critic: values its steps.

  Returns:
    The next episode. It has another address when another node is continued.
  """
  tree = waiting.memory
  if tree is None and waiting.searches_left > 0 and not waiting.landing:
    tree = Tree(((waiting, START),), START)
  if event is None and tree is not None and tree.judged is not None:
    # Time is over in the critic's turn: the step that it judges stays.
    waiting = dataclasses.replace(tree.judged, elapsed=waiting.elapsed)
    if isinstance(waiting.request, aj.episode_state.Done):
      return aj.episode.finish(waiting, aj.Outcome.ANSWERED)
  if (
    tree is None or event is None or isinstance(event, aj.episode_state.Failure)
  ):
    return aj.episode.step(dataclasses.replace(waiting, memory=None), event)
  if tree.judged is not None and isinstance(event, aj.Generation):
    spent = aj.episode.charge_discarded_turn(waiting, event)
    return _grown(spent, tree, tree.judged, critic.progress(event.text))
  after = aj.episode.step(dataclasses.replace(waiting, memory=tree), event)
  match after.request:
    case _ if after.landing:
      return dataclasses.replace(after, memory=None)
    case aj.episode_state.Done(aj.Trajectory(outcome=outcome)):
      if outcome is not aj.Outcome.ANSWERED:  # The branch breaks off.
        return _grown(after, tree)
    case _ if not isinstance(event, aj.episode_state.Retrieved):
      return after  # The step is not over.
  child = dataclasses.replace(after, memory=None)
  if not critic.asks:
    authors = [chunk.author for chunk in reversed(after.chunks)]
    shown = after.chunks[-1 - authors.index(aj.Author.MODEL) :]
    text = "".join(chunk.text for chunk in shown)
    return _grown(after, tree, child, critic.progress(text))
  chunks = (*after.chunks, aj.episode.environment_chunk(after, critic.asks))
  asking = dataclasses.replace(
    after, chunks=chunks, memory=tree._replace(judged=child)
  )
  request = aj.GenerateRequest(
    after.address,
    after.turns,
    asking.context,
    min(_MOST_TOKENS, asking.turn_limit),
    after.environment.stops,
    may_search=False,
  )
  if request.max_tokens <= 0:
    return _grown(after, tree, child)
  return dataclasses.replace(asking, request=request)


def _grown(
  spent: aj.episode_state.Episode,
  tree: Tree,
  child: aj.episode_state.Episode | None = None,
  delta: float = 0.0,
) -> aj.episode_state.Episode:
  """Adds a step, if one ended, and continues a node, charged as `spent` is."""
  value = min(max(tree.value + delta / 10, LEAST), 1.0)
  nodes = tree.nodes if child is None else (*tree.nodes, (child, value))
  share = min(
    spent.searches_left / spent.budget,
    1 - spent.written_tokens / spent.token_cap,
  )
  ends = [isinstance(e.request, aj.episode_state.Done) for e, _ in nodes]
  values, branches = np.array([v for _, v in nodes]), None
  if ends[-1] and child is not None and value >= SURE:
    at = len(nodes) - 1
  elif share < BACKSTOP:
    at = len(nodes) - 1 - int(values[::-1].argmax())  # The latest of the best.
  else:
    rng = np.random.default_rng(spent.address[:4])
    values = values * ~np.array(ends)
    at = int(rng.choice(len(nodes), p=chances(values, share)))
    branches = Tree(nodes, nodes[at][1])
  node, chunks = nodes[at][0], nodes[at][0].chunks
  moved = dataclasses.replace(
    node,
    # What is left is stated anew before a turn.
    chunks=chunks[:-1] if node.scaffold and not ends[at] else chunks,
    # Groups are sampled as attempts 0 and 1.
    address=spent.address._replace(attempt=spent.address.attempt + 2),
    discarded=aj.episode_state.Spending(
      searches=spent.searches_used - len(node.observations),
      written_tokens=spent.written_tokens - sum(node.turn_lengths),
      read_tokens=spent.read_tokens
      - (node.read_tokens - node.discarded.read_tokens),
    ),
    elapsed=spent.elapsed,
    violation=spent.violation or node.violation,
    stopped=branches is None and spent.searches_left > 0,
    memory=branches,
  )
  if not ends[at]:
    return aj.episode.next_turn(moved)
  return aj.episode.finish(moved, aj.Outcome.ANSWERED)


def _with_critic(environment: aj.Environment, critic: Critic) -> aj.Environment:
  """Returns an environment that is played as a tree."""
  grows = functools.partial(step, critic=critic)
  return dataclasses.replace(environment, format=None, step=grows)


def _bavt(texts: Mapping[str, str]) -> aj.Environment:
  critic = Critic(progress, aj.wording.template(texts["critic"]))
  return _with_critic(aj.search_r1.environment(texts), critic)


WORDINGS = {
  "bavt": aj.wording.Wording(
    "bavt.toml",
    {**aj.wording.ONE_PROMPT, "critic": aj.wording.LINE},
    _bavt,
    folder=pathlib.Path(__file__).with_name("texts"),
  ),
  "bavt_world": aj.prompts.WORLD.then(
    functools.partial(_with_critic, critic=Critic(found))
  ),
}

METHOD = aj.method.compared(
  "bavt", "BAVT", WORDINGS, train=lambda config: config
)
