"""The public API, for type checkers and for `__init__.py`.

Each line imports one public name: a module, or an object of one.
"""

# The configuration, and the values that pass between the parts.
import anysearch_jax.config as config
from anysearch_jax.config import ExperimentConfig as ExperimentConfig
import anysearch_jax.budgets as budgets
from anysearch_jax.budgets import Budget as Budget
from anysearch_jax.types import Address as Address
from anysearch_jax.types import Author as Author
from anysearch_jax.types import Engine as Engine
from anysearch_jax.types import EngineError as EngineError
from anysearch_jax.types import Finish as Finish
from anysearch_jax.types import GenerateRequest as GenerateRequest
from anysearch_jax.types import Generation as Generation
from anysearch_jax.types import Group as Group
from anysearch_jax.types import Observation as Observation
from anysearch_jax.types import Outcome as Outcome
from anysearch_jax.types import Passage as Passage
from anysearch_jax.types import Place as Place
from anysearch_jax.types import Question as Question
from anysearch_jax.types import RetrievalError as RetrievalError
from anysearch_jax.types import Retriever as Retriever
from anysearch_jax.types import ScoreRequest as ScoreRequest
from anysearch_jax.types import SearchRequest as SearchRequest
from anysearch_jax.types import Span as Span
from anysearch_jax.types import Trajectory as Trajectory

# The equations: arrays in, arrays out.
import anysearch_jax.algorithms.curriculum as curriculum
import anysearch_jax.algorithms.grpo as grpo
import anysearch_jax.algorithms.ppo as ppo
import anysearch_jax.algorithms.rewards as rewards

# Policies and what samples them.
from anysearch_jax.policy.hf import Policy as Policy
from anysearch_jax.policy.hf import load as load_policy
from anysearch_jax.policy.hf import save as save_policy
from anysearch_jax.policy.architecture import Architecture as Architecture
import anysearch_jax.policy.decoder as decoder
from anysearch_jax.policy.tokenizer import Tokenizer as Tokenizer
from anysearch_jax.rollout.engines import make as make_engine

# Environments, rewards, and systems made of them.
from anysearch_jax.environment.protocol import Action as Action
from anysearch_jax.environment.protocol import ActionKind as ActionKind
from anysearch_jax.environment.protocol import neutralise as neutralise
from anysearch_jax.environment.spec import Environment as Environment
from anysearch_jax.environment.tools import Tool as Tool
from anysearch_jax.environment.tools import search as search_tool
import anysearch_jax.environment.scoring as scoring
from anysearch_jax.methods.systems import environment as get_environment
from anysearch_jax.methods.systems import of_episode as environment_of
import anysearch_jax.environment.wording as wording
import anysearch_jax.environment.official_scoring as official_scoring
import anysearch_jax.environment.prompts as prompts
import anysearch_jax.environment.protocol as protocol
import anysearch_jax.environment.records as records
import anysearch_jax.environment.tools as tools
from anysearch_jax.methods.systems import WORDINGS as WORDINGS
from anysearch_jax.methods.systems import wording_of as wording_of
import anysearch_jax.algorithms.method as method
from anysearch_jax.algorithms.method import Method as Method
import anysearch_jax.methods.search_o1 as search_o1
import anysearch_jax.methods.search_r1 as search_r1
import anysearch_jax.methods.stepsearch as stepsearch
from anysearch_jax.methods.systems import get as get_method
from anysearch_jax.methods.systems import select as select_method
from anysearch_jax.methods.systems import trained as trained_method
from anysearch_jax.algorithms.method import fixed_budget as fixed_budget
import anysearch_jax.config.settings as settings
import anysearch_jax.host.openai_endpoint as openai_endpoint
import anysearch_jax.host.plugins as plugins
from anysearch_jax.algorithms.method import Outcomes as Outcomes

# Episodes; `episode` plays one by hand.
import anysearch_jax.rollout.episode as episode
import anysearch_jax.rollout.episode_state as episode_state
from anysearch_jax.rollout.driver import Assignment as Assignment
from anysearch_jax.rollout.driver import EpisodeParts as EpisodeParts
from anysearch_jax.host.loop import run as run
from anysearch_jax.rollout.driver import run_episode as run_episode
from anysearch_jax.rollout.driver import run_groups as run_groups

# Questions and passages.
from anysearch_jax.world.world import World as World

# Its facts, its words and its exact agents.
from anysearch_jax.world.world_tokenizer import (
  build_tokenizer as world_tokenizer,
)
import anysearch_jax.world.expert_policy as world_agents
import anysearch_jax.world.optimum as optimum
import anysearch_jax.world.world as generated_world
from anysearch_jax.retrieval.documents.folder import update as index_documents
from anysearch_jax.retrieval.encoder.installed import (
  open_encoder as open_encoder,
)
from anysearch_jax.retrieval.lexical import LexicalRetriever as LexicalRetriever
from anysearch_jax.retrieval.pipeline import fuse as fuse
from anysearch_jax.retrieval.pipeline import rerank as rerank

# Training: the parts of a step, and the whole.
import anysearch_jax.training.batching as batching
import anysearch_jax.training.optimizers as optimizers
import anysearch_jax.training.train_step as train_step
from anysearch_jax.training.loop import Trainer as Trainer
from anysearch_jax.sessions.programs import Task as Task
from anysearch_jax.methods.systems import validate as validate

# Asking a policy.
from anysearch_jax.agent.agent import Agent as Agent
from anysearch_jax.rollout.endpoints import Endpoint as Endpoint
from anysearch_jax.agent.events import Reply as Reply
import anysearch_jax.agent.events as events

# Evaluation.
from anysearch_jax.evaluation.harness import Player as Player
from anysearch_jax.evaluation.harness import Playing as Playing
from anysearch_jax.evaluation.harness import evaluate as evaluate
from anysearch_jax.evaluation.journal import claim_folder as claim_folder
from anysearch_jax.types import evaluation_address as evaluation_address
from anysearch_jax.evaluation.journal import Journal as Journal
from anysearch_jax.evaluation.harness import run_each as run_each
from anysearch_jax.evaluation.journal import read as read_episodes

# Statistics: sums over episodes, and their intervals.
import anysearch_jax.evaluation.columns as columns
import anysearch_jax.evaluation.inference as inference
import anysearch_jax.evaluation.measures as measures
from anysearch_jax.evaluation.columns import cluster_of as cluster_of

__version__: str

__all__ = [
  "__version__",
  "config",
  "ExperimentConfig",
  "budgets",
  "Budget",
  "Address",
  "Author",
  "Engine",
  "EngineError",
  "Finish",
  "GenerateRequest",
  "Generation",
  "Group",
  "Observation",
  "Outcome",
  "Passage",
  "Place",
  "Question",
  "RetrievalError",
  "Retriever",
  "ScoreRequest",
  "SearchRequest",
  "Span",
  "Trajectory",
  "curriculum",
  "grpo",
  "ppo",
  "rewards",
  "Policy",
  "load_policy",
  "save_policy",
  "Architecture",
  "decoder",
  "Tokenizer",
  "make_engine",
  "Action",
  "ActionKind",
  "neutralise",
  "Environment",
  "Tool",
  "search_tool",
  "scoring",
  "get_environment",
  "environment_of",
  "wording",
  "official_scoring",
  "prompts",
  "protocol",
  "records",
  "tools",
  "WORDINGS",
  "wording_of",
  "method",
  "Method",
  "search_o1",
  "search_r1",
  "stepsearch",
  "get_method",
  "select_method",
  "trained_method",
  "fixed_budget",
  "settings",
  "openai_endpoint",
  "plugins",
  "Outcomes",
  "episode",
  "episode_state",
  "Assignment",
  "EpisodeParts",
  "run",
  "run_episode",
  "run_groups",
  "World",
  "world_tokenizer",
  "world_agents",
  "optimum",
  "generated_world",
  "index_documents",
  "open_encoder",
  "LexicalRetriever",
  "fuse",
  "rerank",
  "batching",
  "optimizers",
  "train_step",
  "Trainer",
  "Task",
  "validate",
  "Agent",
  "Endpoint",
  "Reply",
  "events",
  "Player",
  "Playing",
  "evaluate",
  "claim_folder",
  "evaluation_address",
  "Journal",
  "run_each",
  "read_episodes",
  "columns",
  "inference",
  "measures",
  "cluster_of",
]
