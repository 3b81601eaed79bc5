"""The range of each number of a configuration.

`training.validation` checks how values fit together.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple


class _Range(NamedTuple):
  """A condition on a number, and its words; NaN satisfies no condition."""

  words: str
  holds: Callable[[float], bool]


def _at_least(least: float) -> _Range:
  return _Range(f"at least {least}", lambda x: x >= least)


_POSITIVE = _Range("above 0", lambda x: x > 0)
_SHARE = _Range("a share, 0 to 1", lambda x: 0 <= x <= 1)
_DECAY = _Range("0 to below 1", lambda x: 0 <= x < 1)
# JAX takes a seed modulo 2^32, so two larger seeds could give the same draws.
_SEED = _Range("0 to 2^32 - 1", lambda x: 0 <= x < 2**32)
_TOP_P = _Range("above 0, at most 1", lambda x: 0 < x <= 1)
# A reward on the scale where a right answer earns 1.
_REWARD = _Range("-1 to 1", lambda x: -1 <= x <= 1)

# Every number of the configuration is listed. A range also applies to each item
# of a tuple.
_RANGES = {
  "seed": _SEED,
  "questions": _at_least(1),
  "group": _at_least(1),
  "save_every": _at_least(1),
  "save_minutes": _at_least(0),
  "method.search_r1.structure": _SHARE,
  "method.search_r1.final": _REWARD,
  "method.search_r1.retrieval": _SHARE,
  "method.stepsearch.key_weight": _at_least(0),
  "method.stepsearch.step_scale": _at_least(0),
  "method.stepsearch.missing": _REWARD,
  "method.zerosearch.noise_start": _SHARE,
  "method.zerosearch.noise_end": _SHARE,
  "method.zerosearch.noise_base": _POSITIVE,
  "method.otc.alpha": _POSITIVE,
  "method.otc.c": _POSITIVE,
  "method.ikea.kb": _REWARD,
  "method.ikea.bad_format": _REWARD,
  "method.ikea.searched_wrong": _REWARD,
  "method.ikea.right": _POSITIVE,
  "method.research.wrong": _REWARD,
  "method.autorefine.refined": _REWARD,
  "method.mt_grpo.executed": _at_least(0),
  "method.mt_grpo.found": _at_least(0),
  "method.mt_grpo.exact": _at_least(0),
  "method.mt_grpo.contained": _at_least(0),
  "method.mt_grpo.well_formed": _at_least(0),
  "method.r1_searcher.stage_one": _SHARE,
  "method.r1_searcher.answer": _at_least(0),
  "method.r1_searcher.formed": _at_least(0),
  "method.r1_searcher.searched": _at_least(0),
  "method.r1_searcher.malformed": _at_least(0),
  "method.ssrl.right": _at_least(0),
  "method.ssrl.formed": _at_least(0),
  "method.beta_grpo.beta": _SHARE,
  "method.hiprag.formed": _SHARE,
  "method.hiprag.process": _at_least(0),
  "method.hiprag.max_tokens": _at_least(1),
  "method.hiprag.concurrency": _at_least(1),
  "method.hiprag.deadline": _POSITIVE,
  "reward.alpha": _at_least(0),
  "reward.beta": _at_least(0),
  "reward.delta": _at_least(0),
  "reward.gamma_max": _at_least(0),
  "reward.gamma_fixed": _at_least(0),
  "reward.abs_searches": _at_least(0),
  "reward.abs_tokens": _at_least(0),
  "reward.abs_dollars": _at_least(0),
  "reward.abs_seconds": _at_least(0),
  "reward.charge": _at_least(0),
  "reward.xi": _POSITIVE,
  "reward.length_limit": _at_least(0),
  "reward.length_tolerance": _at_least(0),
  "curriculum.max_budget": _at_least(1),
  "curriculum.token_levels": _at_least(1),
  "curriculum.cent_levels": _at_least(1),
  "curriculum.phase1_steps": _at_least(0),
  "curriculum.total_steps": _at_least(1),
  "curriculum.steps_per_rollout": _at_least(1),
  "curriculum.epochs": _at_least(1),
  "curriculum.window": _at_least(1),
  "curriculum.uniform_mix": _SHARE,
  "curriculum.epsilon": _POSITIVE,
  "curriculum.fixed_budget": _at_least(-1),
  "objective.clip_low": _at_least(0),
  "objective.clip_high": _at_least(0),
  "objective.kl_coefficient": _at_least(0),
  "objective.advantage_epsilon": _POSITIVE,
  "objective.importance_cap": _at_least(0),
  "method.measure_deadline": _POSITIVE,
  "objective.turn_weight": _at_least(0),
  "objective.entropy_coefficient": _at_least(0),
  "optimizer.learning_rate": _at_least(0),
  "optimizer.b1": _DECAY,
  "optimizer.b2": _DECAY,
  "optimizer.eps": _POSITIVE,
  "optimizer.weight_decay": _at_least(0),
  "optimizer.max_grad_norm": _at_least(0),
  "optimizer.warmup_steps": _at_least(0),
  "optimizer.decay": _SHARE,
  "critic.gamma": _SHARE,
  "critic.lam": _SHARE,
  "critic.learning_rate": _at_least(0),
  "critic.warmup_steps": _at_least(0),
  "critic.alone_steps": _at_least(0),
  "critic.value_clip": _at_least(0),
  "critic.reward_kl": _at_least(0),
  "episode.top_k": _at_least(1),
  "episode.max_generated": _at_least(1),
  "episode.max_context": _at_least(1),
  "episode.answered_bad_turns": _at_least(0),
  "episode.answer_room": _at_least(0),
  "episode.turn_deadline": _POSITIVE,
  "episode.search_deadline": _POSITIVE,
  "sampling.temperature": _at_least(0),
  "sampling.top_p": _TOP_P,
  "sampling.top_k": _at_least(0),
  "engine.slots": _at_least(1),
  "engine.max_context": _at_least(1),
  "engine.kv_tokens": _at_least(0),
  "engine.page": _at_least(1),
  "engine.lanes": _at_least(1),
  "engine.prefill_lanes": _at_least(1),
  "engine.prefill_chunk": _at_least(1),
  "engine.decode_steps": _at_least(1),
  "sglang.deadline": _POSITIVE,
  "sglang.retries": _at_least(0),
  "sglang.wait": _at_least(0),
  "retrieval.price": _at_least(0),
  "retrieval.ef_search": _at_least(0),
  "retrieval.pages.first": _at_least(0),
  "retrieval.pages.words": _at_least(1),
  "retrieval.pages.opened_words": _at_least(1),
  "retrieval.pages.deadline": _POSITIVE,
  "retrieval.pages.largest": _at_least(1024),
  "retrieval.mcp.deadline": _POSITIVE,
  "retrieval.model.concurrency": _at_least(1),
  "retrieval.model.temperature": _at_least(0),
  "retrieval.model.top_p": _TOP_P,
  "retrieval.model.max_tokens": _at_least(1),
  "retrieval.model.deadline": _POSITIVE,
  "search.cache": _at_least(0),
  "search.batch": _at_least(1),
  "search.concurrency": _at_least(1),
  "search.passage_characters": _at_least(1),
  "search.answer_characters": _at_least(1),
  "pipeline.async_level": _at_least(0),
  "pipeline.extra_groups": _at_least(0),
  "batch.row_lengths": _at_least(1),
  "batch.micro_batch_tokens": _at_least(1),
  "batch.max_micro_batches": _at_least(1),
  "batch.max_segments": _at_least(1),
  "batch.attention_chunk": _at_least(1),
  "batch.logprob_chunk": _at_least(1),
  "mesh.data": _at_least(1),
  "mesh.fsdp": _at_least(1),
  "mesh.tensor": _at_least(1),
  "mesh.trainer": _at_least(0),
  "mesh.rollout": _at_least(0),
  "mesh.rollout_tensor": _at_least(0),
  "lora.rank": _at_least(0),
  "lora.alpha": _POSITIVE,
  "data.world_seed": _at_least(0),
  "warm_start.steps": _at_least(1),
  "warm_start.learning_rate": _at_least(0),
  "warm_start.batch_tokens": _at_least(1),
  "warm_start.demonstrations": _at_least(1),
  "warm_start.decision_weight": _at_least(0),
  "warm_start.layers": _at_least(1),
  "warm_start.hidden": _at_least(1),
  "warm_start.heads": _at_least(1),
  "warm_start.kv_heads": _at_least(1),
  "warm_start.mlp": _at_least(1),
  "watch.bad_steps": _at_least(1),
  "watch.max_failed": _SHARE,
  "watch.min_entropy": _at_least(0),
  "watch.max_kl": _at_least(0),
  "watch.max_gap": _at_least(0),
  "watch.max_far": _SHARE,
  "watch.max_largest_gap": _at_least(0),
  "watch.gap_rollouts": _at_least(1),
  "watch.max_fingerprint_gap": _at_least(0),
  "watch.max_stale": _at_least(1),
  "watch.quiet_seconds": _at_least(0),
  "checkpoint.keep_last": _at_least(1),
  "checkpoint.keep_best": _at_least(0),
  "evaluation.budgets": _at_least(0),
  "evaluation.questions": _at_least(0),
  "evaluation.seeds": _SEED,
  "evaluation.search_price": _at_least(0),
  "evaluation.input_price": _at_least(0),
  "evaluation.output_price": _at_least(0),
}
_FINITE = _Range("a finite number", math.isfinite)
# Tuples of numbers that may be empty.
_MAY_BE_EMPTY = (
  "mesh.trainer",
  "mesh.rollout",
  "evaluation.budgets",
  "curriculum.token_levels",
  "curriculum.cent_levels",
)


def check(config: Any, root: str = "") -> None:
  """Refuses numbers outside their ranges, and tuples that must not be empty.

  Args:
    config: an `ExperimentConfig`, or the part of one at `root`.
    root: "" for the whole; `sampling` for a `SamplingConfig`.

  Raises:
    ValueError: the message names the path of the first such value and what was
      expected.
  """
  for path, value in _numbers(config, root):
    name = path.partition("[")[0]
    kind = _RANGES.get(name, _FINITE)
    if value is None:
      if name in _RANGES and name not in _MAY_BE_EMPTY:
        raise ValueError(
          f"{path}: found (), expected one number or more, each {kind.words}."
        )
      continue
    for each in (kind, _FINITE):
      if not each.holds(value):
        raise ValueError(f"{path}: found {value}, expected {each.words}.")


def _numbers(value: Any, path: str = "") -> Iterator[tuple[str, float | None]]:
  """Yields each number with its path; an empty tuple gives one None."""
  if dataclasses.is_dataclass(value):
    for field in dataclasses.fields(value):
      name = f"{path}.{field.name}" if path else field.name
      yield from _numbers(getattr(value, field.name), name)
  elif isinstance(value, tuple):
    if not value:
      yield path, None
    for i, item in enumerate(value):
      yield from _numbers(item, f"{path}[{i}]")
  elif isinstance(value, int | float) and not isinstance(value, bool):
    yield path, value
