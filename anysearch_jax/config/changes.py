"""Which settings may change when a run resumes.

Every setting is of one kind. Settings of identity never change during a run.
Settings of learning may change with `--allow_changes`. Settings of placement
may change at every start.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from anysearch_jax import config as config_lib
from anysearch_jax.config import values as config_values


class Kind(enum.StrEnum):
  """What a setting decides.

  IDENTITY: which run it is: its seed, its questions, their order and number,
    the system, the shapes of what a checkpoint holds.
  LEARNING: what is learned and from which texts: rates, rewards, lengths.
  PLACEMENT: where and how fast the run computes, what it keeps and watches, and
    paths; the files at them are compared by hash, see provenance.json.
  """

  IDENTITY = "identity"
  LEARNING = "learning"
  PLACEMENT = "placement"


_I, _L, _P = Kind.IDENTITY, Kind.LEARNING, Kind.PLACEMENT

# The settings by group; "" is the configuration itself.
_TABLE: dict[str, dict[Kind, str]] = {
  "": {
    _I: "seed questions group",
    _L: "compute_dtype",
    _P: "name policy save_every save_minutes",
  },
  "method": {_I: "name", _P: "measure_deadline"},
  "method.search_r1": {_L: "format_variant structure final retrieval"},
  "method.stepsearch": {_L: "key_weight step_scale missing"},
  "method.zerosearch": {_L: "noise_start noise_end noise_base"},
  "method.otc": {_L: "alpha c form"},
  "method.ikea": {_L: "kb bad_format searched_wrong right"},
  "method.research": {_L: "wrong"},
  "method.autorefine": {_L: "refined"},
  "method.mt_grpo": {_L: "executed found exact contained well_formed"},
  "method.r1_searcher": {_L: "stage_one answer formed searched malformed"},
  "method.ssrl": {_L: "right formed"},
  "method.beta_grpo": {_L: "beta"},
  "method.hiprag": {
    _L: "formed process url name memory_url memory_name max_tokens",
    _P: "key_variable concurrency deadline",
  },
  "reward": {
    _L: "alpha beta delta gamma_max gamma_mode gamma_fixed use_abs use_rel "
    "abs_searches abs_tokens abs_dollars abs_seconds rel_cost charge "
    "xi length_limit length_tolerance function"
  },
  "curriculum": {
    # The curriculum's state has one window per budget, and the number of steps
    # decides how many questions are drawn.
    _I: "max_budget token_levels cent_levels total_steps steps_per_rollout "
    "epochs window",
    _L: "phase1_steps uniform_mix epsilon phase1_scaffold phase2_scaffold "
    "fixed_budget",
  },
  "objective": {
    _I: "advantage",  # It decides whether there is a critic.
    _L: "clip_low clip_high kl_coefficient kl_estimator advantage_epsilon "
    "normalize baseline reduction old_logp importance_cap turn_weight "
    "entropy_coefficient",
  },
  "optimizer": {
    _L: "learning_rate b1 b2 eps weight_decay max_grad_norm warmup_steps decay"
  },
  "critic": {
    _L: "gamma lam learning_rate warmup_steps alone_steps value_clip whiten "
    "reward_kl"
  },
  "episode": {
    _I: "prompts",
    _L: "top_k max_generated max_context answered_bad_turns answer_room",
    # The texts are compared by hash, see provenance.json.
    _P: "prompt_file budget_file control turn_deadline search_deadline",
  },
  "sampling": {_L: "temperature top_p top_k"},
  "engine": {
    _P: "kind slots max_context kv_tokens page lanes prefill_lanes "
    "prefill_chunk decode_steps attention free_kv_while_training"
  },
  "sglang": {_P: "urls deadline retries wait weights api_key_variable"},
  "retrieval": {
    _L: "simulated refined",
    _P: "kind index encoder url web engine milvus collection postgres table "
    "ef_search ranking filter pipeline price key_variable log log_mode",
  },
  "retrieval.pages": {
    _L: "first words opened_words",
    _P: "deadline largest agent allow_private",
  },
  "retrieval.mcp": {_P: "command variables tool query k arguments deadline"},
  "retrieval.model": {
    _L: "name temperature top_p max_tokens",
    _P: "key_variable concurrency deadline",
  },
  "search": {
    _L: "passage_characters answer_characters",
    _P: "cache batch concurrency",
  },
  "pipeline": {_I: "extra_groups", _P: "async_level offload"},
  "batch": {
    _P: "row_lengths micro_batch_tokens max_micro_batches max_segments remat "
    "attention attention_chunk logprob_chunk"
  },
  "mesh": {
    _P: "data fsdp tensor sequence_parallel trainer rollout rollout_tensor"
  },
  "lora": {_I: "rank alpha targets", _L: "base_dtype"},
  "data": {_I: "source world world_seed split", _P: "path"},
  # These settings made the policy that a run starts from; the run does not
  # read them.
  "warm_start": {
    _P: "expert steps learning_rate batch_tokens demonstrations "
    "decision_weight layers hidden heads kv_heads mlp"
  },
  "watch": {
    _P: "bad_steps max_failed min_entropy max_kl max_gap max_far "
    "max_largest_gap gap_rollouts max_fingerprint_gap max_stale "
    "quiet_seconds"
  },
  "checkpoint": {_P: "keep_last keep_best best_metric export_dtype"},
  "evaluation": {
    _P: "budgets pairs questions datasets seeds scaffold scorer search_price "
    "input_price output_price tool_prices"
  },
}
KINDS: dict[str, Kind] = {
  f"{group}.{name}".lstrip("."): kind
  for group, kinds in _TABLE.items()
  for kind, names in kinds.items()
  for name in names.split()
}
# Changing one of these between 0 and another number changes the structure of
# the optimizer's state, so a checkpoint could not be restored.
_SWITCHES = (
  "optimizer.max_grad_norm",
  "optimizer.warmup_steps",
  "optimizer.decay",
  "critic.warmup_steps",
)


class Change(NamedTuple):
  """A setting that differs; `old` and `new` are JSON values."""

  path: str
  kind: Kind
  old: Any
  new: Any

  def __str__(self) -> str:
    return f"{self.path} {json.dumps(self.old)} -> {json.dumps(self.new)}"


def changes(
  stored: Mapping[str, Any], config: config_lib.ExperimentConfig
) -> list[Change]:
  """Returns the settings that differ from those of an earlier start.

  Args:
    stored: the earlier configuration as it was saved. A setting that it lacks
      is newer than that start, and counts as its default.
    config: the present configuration.
  """
  old, new, default = (
    dict(config_values.leaves(json.loads(json.dumps(values))))
    for values in (
      config_values.renamed(stored),
      config_values.to_dict(config),
      config_values.to_dict(config_lib.ExperimentConfig()),
    )
  )
  old = default | old
  return [
    Change(path, _kind(path, value, new.get(path)), value, new.get(path))
    for path, value in old.items()
    if path not in new or value != new[path]
  ]


def refusal(changed: Sequence[Change], *, allow: bool) -> str:
  """Returns why a run must not resume with these changes; "" if it may.

  Args:
    changed: the result of `changes`.
    allow: whether settings of learning may change.
  """
  if identity := named(changed, Kind.IDENTITY):
    return (
      f"found {identity}: such settings say which run it is and never change. "
      "Resume with what the run began with, or name another --output."
    )
  learning = named(changed, Kind.LEARNING)
  if learning and not allow:
    return (
      f"found {learning}: this changes what is learned. Give --allow_changes "
      "to resume with it, or resume with what the run had."
    )
  return ""


def named(changed: Sequence[Change], kind: Kind) -> str:
  """Returns the changes of a kind in words; "" if there are none."""
  return ", ".join(str(change) for change in changed if change.kind == kind)


def _kind(path: str, old: Any, new: Any) -> Kind:
  if path in _SWITCHES and bool(old) != bool(new):
    return Kind.IDENTITY
  # A setting that this version no longer has cannot change any shape.
  return KINDS.get(path, Kind.LEARNING)
