"""Every compared system, with presets SYSTEM[:backbone[:original]].

    python -m launch.train --config=configs/methods.py:search_r1
    python -m launch.train --config=configs/methods.py:zerosearch:qwen2_5_7b
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

Search-o1 and BATS are not trained. StepSearch's questions need evidence
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
Settings = Mapping[str, Mapping[str, Any]]


@dataclasses.dataclass(frozen=True)
class Recipe:
  """verl's GRPO or, with a critic, its PPO, as the authors of a system set it.

  Attributes:
    rollouts: how often the policy samples.
    questions: questions of a rollout.
    group: trajectories of a question.
    updates: optimizer steps on a rollout.
    searches: searches that a trajectory may make.
    learning_rate: of the policy.
    warmup: share of the steps over which it rises.
    critic_rate: learning rate of the critic; None: no critic.
    critic_warmup: share of the steps over which that rises.
    turn: limit on the tokens of a turn; 0: none.
    options: of `method.options`, besides those that the system's training sets.
    settings: what differs from verl's.
  """

  rollouts: int
  questions: int
  group: int
  updates: int
  searches: int
  learning_rate: float
  warmup: float = 0.0
  critic_rate: float | None = None
  critic_warmup: float = 0.0
  turn: int = 0
  options: tuple[str, ...] = ()
  settings: Settings = dataclasses.field(default_factory=dict)


# By system. Of AnySearch and of untrained systems, the settings alone. The
# number after a value is its line in the authors' code.
_RECIPES: dict[str, Recipe | Settings] = {
  # xwsun01/AnySearch at 3d6d276; lines without a file are those of
  # examples/anysearch/scripts/run_train.sh.
  # The run, where it differs from the paper's text: the environment has its
  # turn rules.
  "anysearch": {
    "objective": {
      "deviation": "sample",  # slime/ray/rollout.py:730
      "kl_estimator": "low_var_kl",  # :131
      "importance_cap": 0.0,  # slime/utils/arguments.py:776
    },
    "episode": {
      # _ACTION_PATTERN in examples/anysearch/slime_ext/rollout.py
      "prompts": "anysearch",
    },
  },
  # PeterGriffinJin/Search-R1 at a14dc3a; lines without a file are those of
  # scripts/nq_hotpotqa/v0.2/train_grpo.sh.
  "search_r1": Recipe(
    rollouts=1005,  # :73
    questions=512,  # :31
    group=5,  # :59
    updates=10,  # :45
    searches=4,  # :76
    learning_rate=1e-06,  # :42
    warmup=0.285,  # :43
    turn=500,  # :34
  ),
  # PeterGriffinJin/Search-R1 at a14dc3a; lines without a file are those of
  # scripts/nq_hotpotqa/v0.2/train_ppo.sh.
  "search_r1_ppo": Recipe(
    rollouts=1005,  # :82
    questions=512,  # :31
    group=1,  # :55
    updates=2,  # :44
    searches=4,  # :85
    learning_rate=1e-06,  # :40
    warmup=0.285,  # :43
    critic_rate=1e-05,  # :59
    critic_warmup=0.015,  # :61
    turn=500,  # :34
  ),
  # Zillwang/StepSearch at 43215ba; lines without a file are those of train.sh.
  "stepsearch": Recipe(
    rollouts=1120,  # :69
    questions=128,  # :19
    group=1,  # :43
    updates=4,  # :32
    searches=5,  # :78
    learning_rate=5e-07,  # :28
    warmup=0.285,  # :31
    critic_rate=5e-07,  # :46
    critic_warmup=0.05,  # :48
    turn=800,  # :22
  ),
  # Alibaba-NLP/ZeroSearch at 2d4cdca; lines without a file are those of
  # train_grpo.sh.
  # The simulator writes five documents. The mini-batches of 256 trajectories
  # are one of 256 and one of 64.
  "zerosearch": Recipe(
    rollouts=203,  # README.md:121
    questions=64,  # :26
    group=5,  # :54
    updates=2,  # :40
    searches=5,  # README.md:121
    learning_rate=1e-06,  # :37
    warmup=0.95,  # :38
    turn=500,  # :29
    settings={
      "episode": {
        "top_k": 5,  # README.md:121
      },
    },
  ),
  # sunnynexus/Search-o1 at 6ced48f.
  # The sampling and the number of documents of its script.
  "search_o1": {
    "sampling": {
      "temperature": 0.7,  # scripts/run_search_o1.py:127
      "top_p": 0.8,  # scripts/run_search_o1.py:134
      "top_k": 20,  # scripts/run_search_o1.py:141
    },
    "episode": {
      "top_k": 10,  # scripts/run_search_o1.py:204
    },
  },
  # No code is public.
  # The paper's tracker gives numbers and no advice.
  "bats": {
    "episode": {
      "prompts": "bats_numbers",  # the paper, appendix on prompts
    },
  },
}


def get_config(preset: str = "") -> config_lib.ExperimentConfig:
  # Imported late, because it imports JAX and importing configs must not.
  from anysearch_jax.methods import systems

  method_names = {name: name for name in systems.METHODS}
  method_names["search_r1_ppo"] = "search_r1"
  config = of_preset(
    preset,
    method_names,
    _RECIPES,
    file="configs/methods.py",
  )
  if preset.startswith("search_r1_ppo") and not preset.endswith(_ORIGINAL):
    rate = round(_CRITIC_RATE * config.optimizer.learning_rate, 12)
    return config_lib.changed(
      config, objective={"advantage": "gae"}, critic={"learning_rate": rate}
    )
  return config


def of_preset(
  preset: str,
  method_names: Mapping[str, str],
  recipes: Mapping[str, Recipe | Settings],
  *,
  file: str,
) -> config_lib.ExperimentConfig:
  """Returns the configuration of a system, on a backbone or in the world.

  Args:
    preset: SYSTEM[:backbone[:original]].
    method_names: the value of `method.name` of each system.
    recipes: the published ones, by system; some systems have none.
    file: whose presets these are, for sentences.

  Raises:
    ValueError: there is no such system, backbone or recipe.
  """
  from anysearch_jax.methods import systems

  name, _, setup = preset.partition(":")
  if name not in method_names:
    raise ValueError(
      f"{file}: found preset {preset!r}, expected a system, one of "
      f"{', '.join(method_names)}, as in {file}:{next(iter(method_names))}."
    )
  backbone, _, recipe = setup.partition(":")
  endings = ("", _ORIGINAL) if backbone else ("",)
  if backbone not in ("", *BACKBONES) or recipe not in endings:
    raise ValueError(
      f"{name}: found preset {setup!r}, expected one of "
      f"{', '.join(BACKBONES)}, with or without :{_ORIGINAL}, or none for the "
      "generated world; on another configuration write "
      f"--method={method_names[name]}, as in "
      "--config=configs/one_gpu.py:qwen3_1_7b-24 "
      f"--method={method_names[name]}."
    )
  if recipe and name not in recipes:
    raise ValueError(
      f"{name}: found preset {setup!r}, but its authors published no recipe "
      "of their own (docs/fidelity.md); expected the backbone alone."
    )
  base = importlib.import_module(f"configs.{backbone or _WORLD}").get_config()
  config = systems.select(
    dataclasses.replace(
      base, name="-".join(filter(None, (name, backbone, recipe)))
    ),
    method_names[name],
  )
  return _original(config, recipes[name]) if recipe else config


def _original(
  config: config_lib.ExperimentConfig, recipe: Recipe | Settings
) -> config_lib.ExperimentConfig:
  """Returns the original recipe of a system on a backbone.

  GRPO has a KL term in the loss and no critic; PPO has a critic, and the KL
  penalty in the tokens' rewards.
  """
  if not isinstance(recipe, Recipe):
    return config_lib.changed(config, **recipe)
  steps = recipe.rollouts * recipe.updates
  trained = dataclasses.replace(
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
      advantage="gae" if recipe.critic_rate else "group",
      kl_coefficient=0.0 if recipe.critic_rate else _KL,
      kl_estimator="k3" if recipe.critic_rate else "low_var_kl",
      deviation="population" if recipe.critic_rate else "sample",
      clip_low=0.2,
      clip_high=0.2,
      reduction="token-mean",
      entropy_coefficient=0.001,
      # Sampling waits for training, so the weights that sampled are the ones
      # that the trainer recomputes with.
      old_logp="trainer",
    ),
    optimizer=config_lib.OptimizerConfig(
      learning_rate=recipe.learning_rate,
      b2=0.999,
      decayed="all",
      warmup_steps=int(recipe.warmup * steps),
    ),
    pipeline=config_lib.PipelineConfig(async_level=0),
    episode=dataclasses.replace(config.episode, max_turn=recipe.turn),
  )
  if recipe.critic_rate:
    critic = config_lib.CriticConfig(
      learning_rate=recipe.critic_rate,
      warmup_steps=int(recipe.critic_warmup * steps),
      value_clip=_CRITIC_CLIP,
      reward_kl=_KL,
    )
    trained = dataclasses.replace(trained, critic=critic)
  options = (*config.method.options, *recipe.options)
  trained = config_lib.changed(trained, method={"options": options})
  return config_lib.changed(trained, **recipe.settings)
