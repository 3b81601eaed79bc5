"""Plays an episode as BAVT's tree, under its one budget (arXiv 2603.12634).

A node is an episode after a step: a search with what it showed, or an answer.
The environment's critic tells a step's progress d, and the node has the value
V + d / 10, where V is that of the node before. While the share r of the budget
is left, the node to continue is drawn in proportion to V^(1/r). What other
branches and the critic spent stays charged.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from anysearch_jax import types
from anysearch_jax.rollout import control, episode, episode_state

# Values of the root and of the worst node, and that of an answer to accept.
START, LEAST, SURE = 0.5, 0.1, 0.8
# With a smaller share of the budget, the best node is continued to its end.
BACKSTOP = 0.2
_MOST = 512  # Tokens of a turn of the critic.


def chances(values: np.ndarray, share: float) -> np.ndarray:
  """Returns the chances of nodes of these values, with 0 < share <= 1 left."""
  weights = (values / values.max()) ** (1 / share)
  return weights / weights.sum()


def step(
  waiting: episode_state.Episode, event: episode_state.Event | None
) -> episode_state.Episode:
  """Advances an episode as `control.step` does, or its tree."""
  env, tree = waiting.environment, waiting.tree
  if env.critic is None:
    return control.step(waiting, event)
  if tree is None and waiting.left > 0 and not waiting.landing:
    tree = episode_state.Tree(((waiting, START),), START)
  if event is None and tree is not None and tree.judged is not None:
    # Time is over in the critic's turn: the step that it judges stays.
    waiting = dataclasses.replace(tree.judged, elapsed=waiting.elapsed)
    if isinstance(waiting.request, episode_state.Done):
      return _ended(waiting)
  if tree is None or event is None or isinstance(event, episode_state.Failure):
    return control.step(dataclasses.replace(waiting, tree=None), event)
  if tree.judged is not None and isinstance(event, types.Generation):
    spent = control.without(waiting, event)
    return _grown(spent, tree, tree.judged, env.critic(event.text))
  after = episode.step(dataclasses.replace(waiting, tree=tree), event)
  match after.request:
    case _ if after.landing:
      return dataclasses.replace(after, tree=None)
    case episode_state.Done(types.Trajectory(outcome=outcome)):
      if outcome is not types.Outcome.ANSWERED:  # The branch breaks off.
        return _grown(after, tree)
    case _ if not isinstance(event, episode_state.Retrieved):
      return after  # The step is not over.
  child = dataclasses.replace(after, tree=None)
  if not env.critic_asks:
    authors = [chunk.author for chunk in reversed(after.chunks)]
    shown = after.chunks[-1 - authors.index(types.Author.MODEL) :]
    text = "".join(chunk.text for chunk in shown)
    return _grown(after, tree, child, env.critic(text))
  chunks = (*after.chunks, episode.written(after, env.critic_asks))
  asking = dataclasses.replace(
    after, chunks=chunks, tree=tree._replace(judged=child)
  )
  request = types.GenerateRequest(
    after.address,
    after.turns,
    asking.context,
    min(_MOST, asking.most_tokens),
    env.stops,
    may_search=False,
  )
  if request.max_tokens <= 0:
    return _grown(after, tree, child)
  return dataclasses.replace(asking, request=request)


def _grown(
  spent: episode_state.Episode,
  tree: episode_state.Tree,
  child: episode_state.Episode | None = None,
  progress: float = 0.0,
) -> episode_state.Episode:
  """Adds a step, if one ended, and continues a node, charged as `spent` is."""
  value = min(max(tree.value + progress / 10, LEAST), 1.0)
  nodes = tree.nodes if child is None else (*tree.nodes, (child, value))
  share = min(spent.left / spent.budget, 1 - spent.written / spent.token_cap)
  ends = [isinstance(e.request, episode_state.Done) for e, _ in nodes]
  values, branches = np.array([v for _, v in nodes]), None
  if ends[-1] and child is not None and value >= SURE:
    at = len(nodes) - 1
  elif share < BACKSTOP:
    at = len(nodes) - 1 - int(values[::-1].argmax())  # The latest of the best.
  else:
    rng = np.random.default_rng(spent.address[:4])
    values = values * ~np.array(ends)
    at = int(rng.choice(len(nodes), p=chances(values, share)))
    branches = episode_state.Tree(nodes, nodes[at][1])
  node, chunks = nodes[at][0], nodes[at][0].chunks
  moved = dataclasses.replace(
    node,
    # What is left is stated anew before a turn.
    chunks=chunks[:-1] if node.scaffold and not ends[at] else chunks,
    # Groups are sampled as attempts 0 and 1.
    address=spent.address._replace(attempt=spent.address.attempt + 2),
    elsewhere=spent.used - len(node.observations),
    discarded=spent.written - sum(node.turn_lengths),
    reread=spent.read - (node.read - node.reread),
    elapsed=spent.elapsed,
    violation=spent.violation or node.violation,
    stopped=branches is None and spent.left > 0,
    tree=branches,
  )
  if not ends[at]:
    return episode.next_turn(moved)
  return _ended(moved)


def _ended(answered: episode_state.Episode) -> episode_state.Episode:
  ended = answered.trajectory(types.Outcome.ANSWERED)
  return dataclasses.replace(answered, request=episode_state.Done(ended))
