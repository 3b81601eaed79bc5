"""Every compared system, with presets SYSTEM[:backbone[:original]].

    python -m launch.train --config=configs/methods.py:search_r1
    python -m launch.train --config=configs/methods.py:otc:qwen2_5_7b
    python -m launch.evaluate --config=configs/methods.py:bats \
        --policy=configs/graded_world_policy --budgets=0..8 --output=runs/bats

Without a backbone, a system is trained in the generated world like the
quickstart, with the same policy, questions, steps and batch. The backbones
`qwen2_5_7b`, `qwen3_4b` and `llama3_1_8b` are the paper's; each uses the
configuration of that name.

A backbone has two recipes. Without `:original`, all systems share the paper's
optimizer, lengths and budget, so that a comparison is of methods and not of
recipes. With it, a system is trained as its authors published it:
docs/fidelity.md names the line of the original for each number, and what a
recipe does not set is that of the backbone.

Search-o1, BATS and BAVT are not trained. StepSearch's questions need evidence
(docs/data.md), which those of the generated world have, and prepared ones of
MuSiQue, HotpotQA and 2WikiMultihopQA (launch.prepare_data --evidence).
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Mapping
from typing import Any

from anysearch_jax import config as config_lib

BACKBONES = ("qwen2_5_7b", "qwen3_4b", "llama3_1_8b")
_ORIGINAL = "original"
_WORLD = "quickstart"
# verl's, on which all of these systems are built.
_KL = 0.001
_CRITIC_CLIP = 0.5
# The learning rate of Search-R1's critic, in units of the policy's.
_CRITIC_RATE = 10.0
# By group of the configuration, the values of some settings.
_Settings = Mapping[str, Mapping[str, Any]]


@dataclasses.dataclass(frozen=True)
class Recipe:
  """verl's GRPO or, with a critic, its PPO, as the authors of a system set it.

  Attributes:
    rollouts: how often the policy samples.
    questions: questions of a rollout.
    group: trajectories of a question.
    updates: optimizer steps on a rollout.
    searches: searches that a trajectory may make.
    rate: the learning rate.
    warmup: share of the steps over which the rate rises.
    critic: learning rate of the critic, and share of the steps over which it
      rises; None: no critic.
    turn: limit on the tokens of a turn; 0: none.
    settings: what differs from verl's.
  """

  rollouts: int
  questions: int
  group: int
  updates: int
  searches: int
  rate: float
  warmup: float = 0.0
  critic: tuple[float, float] | None = None
  turn: int = 0
  settings: _Settings = dataclasses.field(default_factory=dict)


_SEARCH_R1_PPO = Recipe(
  1005, 512, 1, 2, 4, 1e-6, 0.285, critic=(1e-5, 0.015), turn=500
)
# Of AnySearch and of untrained systems, the settings alone.
_RECIPES: dict[str, Recipe | _Settings] = {
  # The run, where it differs from the paper's text: the environment has its
  # turn rules.
  "anysearch": {
    "objective": {
      "deviation": "sample",
      "kl_estimator": "low_var_kl",
      "importance_cap": 0.0,
    },
    "episode": {"prompts": "anysearch"},
  },
  "search_r1": Recipe(1005, 512, 5, 10, 4, 1e-6, 0.285, turn=500),
  "search_r1_ppo": _SEARCH_R1_PPO,
  # Its README trains by Search-R1's PPO.
  "hiprag": dataclasses.replace(
    _SEARCH_R1_PPO, settings={"method": {"hiprag": {"by_search": True}}}
  ),
  "stepsearch": Recipe(
    1120, 128, 1, 4, 5, 5e-7, 0.285, critic=(5e-7, 0.05), turn=800
  ),
  "autosearch": _SEARCH_R1_PPO,
  # The simulator writes five documents. The mini-batches of 256 trajectories
  # are one of 256 and one of 64.
  "zerosearch": Recipe(
    203, 64, 5, 2, 5, 1e-6, 0.95, turn=500, settings={"episode": {"top_k": 5}}
  ),
  # Its script runs two epochs; the repository does not say of how many
  # questions.
  "ikea": Recipe(
    *(100, 256, 16, 16, 3, 1e-7, 0.75),
    turn=500,
    settings={"episode": {"prompts": "ikea"}},
  ),
  # Two epochs of MuSiQue's 19,938 training questions. Its loop sets no number
  # of searches; the comparison's budgets end at 8. A step has all 1,280
  # trajectories.
  "research": Recipe(
    *(155, 256, 5, 1, 8, 1e-6),
    settings={
      "episode": {"top_k": 5, "max_generated": 8192},
      "batch": {"max_micro_batches": 1024},
    },
  ),
  "autorefine": Recipe(300, 256, 5, 5, 5, 1e-6, turn=512),
  # Two epochs on each rollout.
  "mt_grpo": Recipe(
    *(150, 16, 21, 2, 1, 1e-6),
    settings={
      "curriculum": {"epochs": 2},
      "objective": {
        "kl_coefficient": 0.0,
        "kl_estimator": "k3",
        "entropy_coefficient": 0.0,
        "advantage_epsilon": 1e-4,
      },
      "optimizer": {
        **{"b2": 0.99, "max_grad_norm": 0.1, "warmup_steps": 20},
        **{"weight_decay": 0.0, "decayed": "matrices"},
      },
      "episode": {"top_k": 1},
    },
  ),
  # REINFORCE++ with the group's mean as baseline. Qwen is trained in stage 2
  # alone: 8,148 questions, each asked once.
  "r1_searcher": Recipe(
    *(127, 64, 16, 4, 8, 2e-6),
    turn=512,
    settings={
      "method": {"r1_searcher": {"stage_one": 0.0}},
      "objective": {
        "kl_coefficient": 0.0,
        "kl_estimator": "k3",
        "deviation": "population",
        "entropy_coefficient": 0.0,
        "normalize": "batch",
        "reduction": "sequence-mean",
      },
      "optimizer": {"b2": 0.95, "weight_decay": 0.0, "decayed": "matrices"},
    },
  ),
  # Its script runs five epochs; the repository does not say of how many
  # questions. A step has all 1,280 trajectories.
  "ssrl": Recipe(
    *(200, 256, 5, 1, 3, 1e-6, 0.02),
    settings={
      "objective": {"entropy_coefficient": 0.0},
      "batch": {"max_micro_batches": 1024},
    },
  ),
  # One epoch of 169,615 questions. A step has all 4,096 trajectories.
  "saas": Recipe(
    *(331, 512, 8, 1, 5, 1e-6, 0.285),
    settings={
      "objective": {
        "clip_high": 0.28,
        "entropy_coefficient": 0.0,
        "reduction": "sequence-mean",
      },
      "optimizer": {"b2": 0.98, "decayed": "matrices"},
      "batch": {"max_micro_batches": 2048},
      "method": {"saas": {"formed": 0.1, "repeated": 0.1}},
      "episode": {"max_turn": 512},
    },
  ),
  # The sampling and the number of documents of its script.
  "search_o1": {
    "sampling": {"temperature": 0.7, "top_p": 0.8, "top_k": 20},
    "episode": {"top_k": 10},
  },
  # The paper's tracker gives numbers and no advice.
  "bats": {"episode": {"prompts": "bats_numbers"}},
}


def get_config(preset: str = "") -> config_lib.ExperimentConfig:
  # Imported late, because it imports JAX and importing configs must not.
  from anysearch_jax.methods import systems

  name, _, setup = preset.partition(":")
  known = (*systems.METHODS, "search_r1_ppo")
  if name not in known:
    raise ValueError(
      f"configs/methods.py: found preset {preset!r}, expected a system, one of "
      f"{', '.join(known)}, as in configs/methods.py:search_r1."
    )
  backbone, _, recipe = setup.partition(":")
  recipes = ("", _ORIGINAL) if backbone else ("",)
  if backbone not in ("", *BACKBONES) or recipe not in recipes:
    raise ValueError(
      f"{name}: found preset {setup!r}, expected one of "
      f"{', '.join(BACKBONES)}, with or without :{_ORIGINAL}, or none for the "
      f"generated world; on another configuration write --method={name}, as in "
      f"--config=configs/one_gpu.py:qwen3_1_7b-24 --method={name}."
    )
  if recipe and name not in _RECIPES:
    raise ValueError(
      f"{name}: found preset {setup!r}, but its authors published no recipe "
      "of their own (docs/fidelity.md); expected the backbone alone."
    )
  base = importlib.import_module(f"configs.{backbone or _WORLD}").get_config()
  config = systems.select(
    dataclasses.replace(
      base, name="-".join(filter(None, (name, backbone, recipe)))
    ),
    name.removesuffix("_ppo"),
  )
  if recipe:
    return _original(config, _RECIPES[name])
  if name == "search_r1_ppo":
    rate = round(_CRITIC_RATE * config.optimizer.learning_rate, 12)
    return config_lib.changed(
      config, objective={"advantage": "gae"}, critic={"learning_rate": rate}
    )
  return config


def _original(
  config: config_lib.ExperimentConfig, recipe: Recipe | _Settings
) -> config_lib.ExperimentConfig:
  """Returns the original recipe of a system on a backbone.

  GRPO has a KL term in the loss and no critic; PPO has a critic, and the KL
  penalty in the tokens' rewards.
  """
  if not isinstance(recipe, Recipe):
    return config_lib.changed(config, **recipe)
  steps = recipe.rollouts * recipe.updates
  made = dataclasses.replace(
    config,
    questions=recipe.questions,
    group=recipe.group,
    curriculum=config_lib.CurriculumConfig(
      phase1_steps=0,
      fixed_budget=recipe.searches,
      total_steps=steps,
      steps_per_rollout=recipe.updates,
    ),
    objective=config_lib.ObjectiveConfig(
      advantage="gae" if recipe.critic else "group",
      kl_coefficient=0.0 if recipe.critic else _KL,
      kl_estimator="k3" if recipe.critic else "low_var_kl",
      deviation="population" if recipe.critic else "sample",
      clip_low=0.2,
      clip_high=0.2,
      reduction="token-mean",
      entropy_coefficient=0.001,
      # Sampling waits for training, so the weights that sampled are the ones
      # that the trainer recomputes with.
      old_logp="trainer",
    ),
    optimizer=config_lib.OptimizerConfig(
      learning_rate=recipe.rate,
      b2=0.999,
      decayed="all",
      warmup_steps=int(recipe.warmup * steps),
    ),
    pipeline=config_lib.PipelineConfig(async_level=0),
    episode=dataclasses.replace(config.episode, max_turn=recipe.turn),
  )
  if recipe.critic:
    rate, warmup = recipe.critic
    critic = config_lib.CriticConfig(
      learning_rate=rate,
      warmup_steps=int(warmup * steps),
      value_clip=_CRITIC_CLIP,
      reward_kl=_KL,
    )
    made = dataclasses.replace(made, critic=critic)
  return config_lib.changed(made, **recipe.settings)
