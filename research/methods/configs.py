"""The plug-ins of this folder, with presets SYSTEM[:backbone[:original]].

    python -m launch.train --config=research/methods/configs.py:otc
    python -m launch.train --config=research/methods/configs.py:ikea:qwen2_5_7b

Backbones and recipes are as in configs/methods.py. BAVT is not trained.
"""

from __future__ import annotations

import anysearch_jax as aj
from anysearch_jax.configs import methods as configs
from research import methods

# The number after a value is its line in the authors' code.
_RECIPES: dict[str, configs.Recipe | configs.Settings] = {
  # qualidea1217/HiPRAG at 3e64036; lines without a file are those of
  # scripts/nq_hotpotqa/v0.3/train_ppo_format.sh.
  # Its README trains by Search-R1's PPO.
  "hiprag": configs.Recipe(
    rollouts=1005,  # :91
    questions=512,  # :40
    group=1,  # :64
    updates=2,  # :53
    searches=4,  # :97
    learning_rate=1e-06,  # :49
    warmup=0.285,  # :52
    critic_rate=1e-05,  # :68
    critic_warmup=0.015,  # :70
    turn=500,  # :43
    options=(
      "by_search=True",  # verl/utils/reward_score/qa_em_format.py:289
    ),
  ),
  # bofusun/AutoSearch at 75ce1c5; lines without a file are those of
  # experiments/train_autosearch.sh.
  "autosearch": configs.Recipe(
    rollouts=1005,  # :77
    questions=512,  # :25
    group=1,  # :49
    updates=2,  # :38
    searches=4,  # :83
    learning_rate=1e-06,  # :34
    warmup=0.285,  # :37
    critic_rate=1e-05,  # :53
    critic_warmup=0.015,  # :55
    turn=500,  # :28
  ),
  # hzy312/knowledge-r1 at 79c38e8; lines without a file are those of
  # train_grpo_kb.sh.
  # Its script runs two epochs; the repository does not say of how many
  # questions.
  "ikea": configs.Recipe(
    rollouts=100,  # :84
    questions=256,  # :43
    group=16,  # :71
    updates=16,  # :57
    searches=3,  # :87
    learning_rate=1e-07,  # :54
    warmup=0.75,  # :55
    turn=500,  # :46
    settings={
      "episode": {
        # scripts/data_process/nq_hotpotqa_knowledge_boundary.py:26
        "prompts": methods.prompts_name("ikea"),
      },
    },
  ),
  # Agent-RL/ReSearch at c820a43; lines without a file are those of
  # scripts/train/train.sh.
  # Two epochs of MuSiQue's 19,938 training questions. Its loop sets no number
  # of searches; the comparison's budgets end at 8. A step has all 1,280
  # trajectories.
  "research": configs.Recipe(
    rollouts=155,  # :22
    questions=256,  # :6
    group=5,  # :14
    updates=1,  # :7
    searches=8,  # src/verl/workers/rollout/vllm_rollout/vllm_rollout.py:351
    learning_rate=1e-06,  # :86
    settings={
      "episode": {
        "top_k": 5,  # src/verl/workers/rollout/vllm_rollout/vllm_rollout.py:284
        "max_generated": 8192,  # :9
      },
      "batch": {
        "max_micro_batches": 1024,  # scripts/train/train.sh
      },
    },
  ),
  # syr-cn/AutoRefine at 8363788; lines without a file are those of
  # cmd/train.sh.
  "autorefine": configs.Recipe(
    rollouts=300,  # :70
    questions=256,  # :24
    group=5,  # :56
    updates=5,  # :42
    searches=5,  # :30
    learning_rate=1e-06,  # :40
    turn=512,  # :27
  ),
  # SiliangZeng/Multi-Turn-RL-Agent at 7dbdd08.
  # Two epochs on each rollout.
  "mt_grpo": configs.Recipe(
    rollouts=150,  # scripts/run_mt_grpo.sh:17
    questions=16,  # scripts/run_mt_grpo.sh:29
    group=21,  # scripts/run_mt_grpo.sh:13
    updates=2,  # scripts/run_mt_grpo.sh:16
    searches=1,  # verifiers/examples/triviaqa_search.py:31
    learning_rate=1e-06,  # scripts/run_mt_grpo.sh:12
    settings={
      "curriculum": {
        "epochs": 2,  # scripts/run_mt_grpo.sh:16
      },
      "objective": {
        "kl_coefficient": 0.0,  # scripts/run_mt_grpo.sh:18
        "kl_estimator": "k3",
        "entropy_coefficient": 0.0,
        # verifiers/trainers/grpo_env_trainer.py:267
        "advantage_epsilon": 0.0001,
      },
      "optimizer": {
        "b2": 0.99,  # verifiers/utils/config_utils.py:21
        "max_grad_norm": 0.1,  # verifiers/utils/config_utils.py:22
        "warmup_steps": 20,  # verifiers/utils/config_utils.py:17
        "weight_decay": 0.0,  # TRL's default
        "decayed": "matrices",
      },
      "episode": {
        "top_k": 1,  # verifiers/tools/local_wiki_search.py:36
      },
    },
  ),
  # RUCAIBox/R1-Searcher at 631167c; lines without a file are those of
  # scripts/qwen_reinforce_plus_train.sh.
  # REINFORCE++ with the group's mean as baseline. Qwen is trained in stage 2
  # alone: 8,148 questions, each asked once.
  "r1_searcher": configs.Recipe(
    rollouts=127,  # :22
    questions=64,  # :25
    group=16,  # :21
    updates=4,  # :24
    # OpenRLHF-RAG/openrlhf/trainer/ppo_utils/experience_maker.py:1127
    searches=8,
    learning_rate=2e-06,  # :27
    # OpenRLHF-RAG/openrlhf/trainer/ppo_utils/experience_maker.py:1105
    turn=512,
    options=(
      "stage_one=0.0",  # README.md:155
    ),
    settings={
      "objective": {
        "kl_coefficient": 0.0,  # :26
        "kl_estimator": "k3",
        "deviation": "population",
        "entropy_coefficient": 0.0,
        # OpenRLHF-RAG/openrlhf/trainer/ppo_trainer.py:256
        "normalize": "batch",
        "reduction": "sequence-mean",  # OpenRLHF-RAG/openrlhf/models/loss.py:81
      },
      "optimizer": {
        "b2": 0.95,  # OpenRLHF-RAG/openrlhf/cli/train_ppo_ray.py:297
        "weight_decay": 0.0,  # OpenRLHF-RAG/openrlhf/cli/train_ppo_ray.py:265
        "decayed": "matrices",
      },
    },
  ),
  # TsinghuaC3I/SSRL at 3009f21; lines without a file are those of
  # examples/ssrl/example.sh.
  # Its script runs five epochs; the repository does not say of how many
  # questions. A step has all 1,280 trajectories.
  "ssrl": configs.Recipe(
    rollouts=200,  # :57
    questions=256,  # :15
    group=5,  # :41
    updates=1,  # :25
    searches=3,  # :16
    learning_rate=1e-06,  # :23
    warmup=0.02,  # :34
    settings={
      "objective": {
        "entropy_coefficient": 0.0,  # :30
      },
      "batch": {
        "max_micro_batches": 1024,  # examples/ssrl/example.sh
      },
    },
  ),
  # GuoqingWang1/IGPO at bff163b; lines without a file are those of
  # policy_optimization.sh.
  # One epoch; how many questions it has could not be read. The last of ten
  # turns answers.
  "igpo": configs.Recipe(
    rollouts=200,  # :63
    questions=32,  # :20
    group=16,  # :59
    updates=16,  # :28
    searches=9,  # :60
    learning_rate=1e-06,  # :27
    turn=2000,  # :22
    settings={
      "episode": {
        "top_k": 10,  # scrl/handler/config.yaml:3
      },
    },
  ),
  # XMUDeepLIT/SAAS at d27fa54; lines without a file are those of
  # search/shell/train.sh.
  # One epoch of 169,615 questions. A step has all 4,096 trajectories.
  "saas": configs.Recipe(
    rollouts=331,  # :86
    questions=512,  # :35
    group=8,  # :30
    updates=1,  # :111
    searches=5,  # search/generate_with_search.py:20
    learning_rate=1e-06,  # :38
    warmup=0.285,  # :39
    options=(
      "formed=0.1",  # search/generate_with_search.py:41
      "repeated=0.1",  # search/generate_with_search.py:414
    ),
    settings={
      "objective": {
        "clip_high": 0.28,  # :139
        "entropy_coefficient": 0.0,  # :137
        "reduction": "sequence-mean",  # slime/utils/arguments.py:750
      },
      "optimizer": {
        "b2": 0.98,  # :152
        "decayed": "matrices",
      },
      "batch": {
        "max_micro_batches": 2048,  # search/shell/train.sh
      },
      "episode": {
        "max_turn": 512,  # :37
      },
    },
  ),
}


def get_config(preset: str = "") -> aj.ExperimentConfig:
  return configs.of_preset(
    preset,
    {system: methods.method_name(system) for system in methods.COMPARED},
    _RECIPES,
    file="research/methods/configs.py",
  )
