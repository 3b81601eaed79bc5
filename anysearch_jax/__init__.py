"""AnySearch in JAX: one search policy for any budget.

The names in `__all__` are the public API. They stay where they are, and each is
imported when it is first used: `import anysearch_jax` imports no JAX.
`examples/` uses these names only.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_TYPES = (
  "Address Author Engine Finish GenerateRequest Generation Group Passage "
  "Question RetrievalError Retriever SearchRequest Trajectory"
).split()
# Where each public name is: a module, or an object in one. `retrieval` is a
# package of its own, because it also serves searches without this one.
_WHERE = {
  # The configuration, and the values that pass between the parts.
  "config": "anysearch_jax.config",
  "ExperimentConfig": "anysearch_jax.config:ExperimentConfig",
  "budgets": "anysearch_jax.budgets",
  "Budget": "anysearch_jax.budgets:Budget",
  **{name: f"anysearch_jax.types:{name}" for name in _TYPES},
  # The equations: arrays in, arrays out.
  "curriculum": "anysearch_jax.algorithms.curriculum",
  "grpo": "anysearch_jax.algorithms.grpo",
  "ppo": "anysearch_jax.algorithms.ppo",
  "rewards": "anysearch_jax.algorithms.rewards",
  # Policies and what samples them.
  "Policy": "anysearch_jax.policy.hf:Policy",
  "load_policy": "anysearch_jax.policy.hf:load",
  "save_policy": "anysearch_jax.policy.hf:save",
  "Architecture": "anysearch_jax.policy.architecture:Architecture",
  "decoder": "anysearch_jax.policy.decoder",
  "Tokenizer": "anysearch_jax.policy.tokenizer:Tokenizer",
  "make_engine": "anysearch_jax.rollout.engines:make",
  # Environments, rewards, and systems made of them.
  "Action": "anysearch_jax.environment.protocol:Action",
  "ActionKind": "anysearch_jax.environment.protocol:ActionKind",
  "Environment": "anysearch_jax.environment.spec:Environment",
  "Tool": "anysearch_jax.environment.tools:Tool",
  "search_tool": "anysearch_jax.environment.tools:search",
  "scoring": "anysearch_jax.environment.scoring",
  "get_environment": "anysearch_jax.methods.systems:environment",
  "wording": "anysearch_jax.environment.wording",
  "WORDINGS": "anysearch_jax.methods.systems:WORDINGS",
  "Method": "anysearch_jax.methods.method:Method",
  "get_method": "anysearch_jax.methods.systems:get",
  "fixed_budget": "anysearch_jax.methods.method:fixed_budget",
  "Outcomes": "anysearch_jax.methods.method:Outcomes",
  # Episodes; `episode` plays one by hand.
  "episode": "anysearch_jax.rollout.episode",
  "episode_state": "anysearch_jax.rollout.episode_state",
  "Assignment": "anysearch_jax.rollout.driver:Assignment",
  "EpisodeParts": "anysearch_jax.rollout.driver:EpisodeParts",
  "run": "anysearch_jax.host.loop:run",
  "run_episode": "anysearch_jax.rollout.driver:run_episode",
  "run_groups": "anysearch_jax.rollout.driver:run_groups",
  # Questions and passages.
  "World": "anysearch_jax.world.world:World",
  # Its words, its expert and its best agent.
  "world_tokenizer": "anysearch_jax.world.world_tokenizer:build_tokenizer",
  "expert": "anysearch_jax.world.expert",
  "optimum": "anysearch_jax.world.optimum",
  "index_documents": "retrieval.documents.folder:update",
  "LexicalRetriever": "retrieval.lexical:LexicalRetriever",
  "fuse": "retrieval.pipeline:fuse",
  "rerank": "retrieval.pipeline:rerank",
  # Training: the parts of a step, and the whole.
  "batching": "anysearch_jax.training.batching",
  "optimizers": "anysearch_jax.training.optimizers",
  "train_step": "anysearch_jax.training.train_step",
  "Trainer": "anysearch_jax.training.loop:Trainer",
  "validate": "anysearch_jax.training.validation:validate",
  # Asking a policy.
  "Agent": "anysearch_jax.agent.agent:Agent",
  "Endpoint": "anysearch_jax.rollout.endpoints:Endpoint",
  "Reply": "anysearch_jax.agent.events:Reply",
  "events": "anysearch_jax.agent.events",
  # Evaluation.
  "Player": "anysearch_jax.evaluation.harness:Player",
  "Playing": "anysearch_jax.evaluation.harness:Playing",
  "evaluate": "anysearch_jax.evaluation.harness:evaluate",
  "claim_folder": "anysearch_jax.evaluation.journal:claim",
  "evaluation_address": "anysearch_jax.evaluation.harness:address",
  "Journal": "anysearch_jax.evaluation.journal:Journal",
  "control": "anysearch_jax.rollout.control",
  "run_each": "anysearch_jax.evaluation.harness:each",
  "read_episodes": "anysearch_jax.evaluation.journal:read",
  # Statistics: sums over episodes, and their intervals.
  "inference": "anysearch_jax.evaluation.inference",
  "measures": "anysearch_jax.evaluation.measures",
  "cluster_of": "anysearch_jax.evaluation.columns:cluster_of",
}

__all__ = ["__version__", *_WHERE]


def __getattr__(name: str) -> Any:
  """Imports a public name when it is first used (PEP 562)."""
  if name not in _WHERE:
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
  module, _, attribute = _WHERE[name].partition(":")
  found = importlib.import_module(module)
  value = getattr(found, attribute) if attribute else found
  globals()[name] = value
  return value


def __dir__() -> list[str]:
  return sorted({*globals(), *__all__})
