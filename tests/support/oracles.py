"""The paper's equations in float64, one scalar at a time.

Written from the text, not from the implementation: plain loops over lists, so
that a reader can hold them against the page.
"""

from __future__ import annotations

import collections
import math

import numpy as np

from anysearch_jax import config as config_lib


def length_reward(n, limit, tolerance):
  """R_length, three cases."""
  if n <= limit:
    return 0.0
  if n <= limit + tolerance:
    return (limit - n) / tolerance
  return -1.0


def rewards(
  em, format_, tokens, used, budget, valid, c: config_lib.RewardConfig
):
  """The reward table of one group: a dict of lists, and gamma a number."""
  members = [i for i in range(len(em)) if valid[i]]
  correct = [i for i in members if em[i] == 1]
  b_min = min((used[i] for i in correct), default=0)
  b_max = max((used[i] for i in correct), default=0)
  gamma = {
    "adaptive": c.gamma_max * len(correct) / max(len(members), 1),
    "fixed": c.gamma_fixed,
    "off": 0.0,
  }[c.gamma_mode]
  names = ("em", "format", "length", "r_abs", "r_rel", "tool", "total")
  out = {name: [0.0] * len(em) for name in names}
  for i in members:
    answer = 1.0 if i in correct else 0.0
    r_abs = answer * (budget - used[i]) / budget if budget else 0.0
    r_rel = answer * (1 - (used[i] - b_min) / (b_max - b_min + c.xi))
    tool = (r_abs if c.use_abs else answer) * (r_rel if c.use_rel else answer)
    length = length_reward(tokens[i], c.length_limit, c.length_tolerance)
    row = {
      "em": answer,
      "format": float(format_[i]),
      "length": length,
      "r_abs": r_abs,
      "r_rel": r_rel,
      "tool": tool,
      "total": c.alpha * answer
      + c.beta * float(format_[i])
      + c.delta * length
      + gamma * tool
      - c.charge * used[i],
    }
    for name in names:
      out[name][i] = row[name]
  return {**out, "gamma": gamma}


def share_saved(em, spent, caps, weights):
  """R_abs in several units of one trajectory; a cap of None is no cap."""
  units = [u for u in weights if weights[u] and caps[u]]
  if not em or not units:
    return 0.0
  saved = (weights[u] * (caps[u] - spent[u]) / caps[u] for u in units)
  return math.fsum(saved) / math.fsum(weights[u] for u in units)


def relative_cost(em, cost, valid, xi):
  """R_rel of costs of one group, as shares of the dearest right answer."""
  right = [c for e, c, v in zip(em, cost, valid) if e and v]
  if not right:
    return [0.0] * len(em)
  most, least = max(right), min(right)
  if not most:
    return [float(bool(e and v)) for e, v in zip(em, valid)]
  return [
    1 - (c - least) / (most - least + xi * most) if e and v else 0.0
    for e, c, v in zip(em, cost, valid)
  ]


def advantages(total, valid, epsilon, normalize, deviation="population"):
  """The advantages of a rollout: `total` and `valid` are rows of groups."""
  centred, counts = [], [sum(map(bool, row)) for row in valid]
  for rewards, judged, count in zip(total, valid, counts):
    members = [float(r) for r, v in zip(rewards, judged) if v]
    mean = math.fsum(members) / max(count, 1)
    equal = len(set(members)) < 2
    centred.append(
      [
        float(r) - mean if v and not equal else 0.0
        for r, v in zip(rewards, judged)
      ]
    )
  squares = [math.fsum(x * x for x in row) for row in centred]
  less = {"population": 0, "sample": 1}[deviation]
  of_batch = math.sqrt(math.fsum(squares) / max(sum(counts) - less, 1))
  scales = {
    "group": [math.sqrt(s / max(n - less, 1)) for s, n in zip(squares, counts)],
    "batch": [of_batch] * len(centred),
  }
  if normalize == "none":
    return centred
  return [
    [x / (scale + epsilon) for x in row]
    for row, scale in zip(centred, scales[normalize])
  ]


def clamped(log_ratio):
  """A log-ratio that is exponentiated, as verl bounds it."""
  return min(max(log_ratio, -20.0), 20.0)


def kl(logp, reference, estimator):
  """KL(policy || reference) at one token."""
  x = clamped(reference - logp)
  return {
    "k1": logp - reference,
    "k2": 0.5 * (logp - reference) ** 2,
    "k3": math.exp(x) - x - 1,
    "low_var_kl": min(math.exp(x) - x - 1, 10.0),
  }[estimator]


def kl_gradient(logp, reference, estimator):
  """Its derivative by logp."""
  x = clamped(reference - logp)
  return {
    "k1": 1.0,
    "k2": logp - reference,
    "k3": 1 - math.exp(x) if abs(reference - logp) < 20 else 0.0,
    "low_var_kl": 1 - math.exp(x) if math.exp(x) - x - 1 < 10 else 0.0,
  }[estimator]


def surrogate(logp, behaviour, advantage, c: config_lib.ObjectiveConfig):
  """min(r A, clip(r, 1 - low, 1 + high) A) at one token."""
  ratio = math.exp(clamped(logp - behaviour))
  clipped = min(max(ratio, 1 - c.clip_low), 1 + c.clip_high)
  kept = min(ratio * advantage, clipped * advantage)
  if c.old_logp == "engine" and c.importance_cap and advantage < 0:
    return max(kept, c.importance_cap * advantage)  # Dual clip.
  return kept


def surrogate_gradient(
  logp, behaviour, advantage, c: config_lib.ObjectiveConfig
):
  """Its derivative by logp: r A, or 0 where the clip is the minimum."""
  ratio = math.exp(clamped(logp - behaviour))
  if logp - behaviour > 20:
    return 0.0
  held = (advantage > 0 and ratio > 1 + c.clip_high) or (
    advantage < 0 and ratio < 1 - c.clip_low
  )
  if c.old_logp == "engine" and c.importance_cap and advantage < 0:
    held = held or ratio > c.importance_cap
  return 0.0 if held else ratio * advantage


def importance(old, behaviour, c: config_lib.ObjectiveConfig):
  """min(pi_old / pi_behaviour, cap) at one token; 1 where there is no cap."""
  if not c.importance_cap or c.old_logp == "engine":
    return 1.0
  return min(math.exp(old - behaviour), c.importance_cap)


def loss(trajectories, c: config_lib.ObjectiveConfig):
  """-J over the valid trajectories of a step, and its token gradients.

  Each trajectory is (logp, behaviour, old, reference, advantage): lists over
  its model tokens, and a number.
  """
  tokens = sum(len(logp) for logp, *_ in trajectories)
  total, gradients = 0.0, []
  for logp, behaviour, old, reference, advantage in trajectories:
    share = {
      "sequence-mean": 1 / (len(trajectories) * max(len(logp), 1)),
      "token-mean": 1 / max(tokens, 1),
    }[c.reduction]
    gradients.append([])
    for new, sampled, start, ref in zip(logp, behaviour, old, reference):
      kept = importance(start, sampled, c)
      total -= share * (
        kept * surrogate(new, start, advantage, c)
        - c.kl_coefficient * kl(new, ref, c.kl_estimator)
      )
      gradients[-1].append(
        -share
        * (
          kept * surrogate_gradient(new, start, advantage, c)
          - c.kl_coefficient * kl_gradient(new, ref, c.kl_estimator)
        )
      )
  return total, gradients


class Windows:
  """Each level's last W outcomes, in order; a level may be a pair."""

  def __init__(self, c: config_lib.CurriculumConfig):
    self.config = c
    levels = range(1, c.max_budget + 1)
    pairs = [(b, t) for b in levels for t in c.token_levels]
    self.held = {
      level: collections.deque(maxlen=c.window) for level in pairs or levels
    }

  def record(self, budgets, em, valid, tokens=None):
    levels = list(map(int, budgets))
    if tokens is not None:
      levels = list(zip(levels, map(int, tokens)))
    for level, outcome, v in zip(levels, em, valid):
      if v and level in self.held:
        self.held[level].append(int(outcome))

  def probabilities(self):
    c = self.config
    accuracy = [sum(w) / len(w) if w else 0.0 for w in self.held.values()]
    gap = [max(accuracy) - r + c.epsilon for r in accuracy]
    return np.array(
      [
        (1 - c.uniform_mix) * g / sum(gap) + c.uniform_mix / len(gap)
        for g in gap
      ]
    )
