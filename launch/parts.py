"""Builds the parts that commands share: questions and provenance."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import json
import pathlib
import typing
from collections.abc import Iterator, Sequence

from anysearch_jax import config as config_lib
from anysearch_jax import types
from anysearch_jax.host import plugins

if typing.TYPE_CHECKING:
  from anysearch_jax.data import prepared
  from anysearch_jax.retrieval import lexical
  from anysearch_jax.rollout import driver
  from anysearch_jax.world import world as world_lib

  # Where questions come from, and passages if it brings them.
  Source = typing.Union[  # noqa: UP007  # `WorldSource` comes later.
    "WorldSource", prepared.Prepared, prepared.OwnQuestions
  ]


class WorldSource(typing.NamedTuple):
  """The generated world: its questions and its passages."""

  world: world_lib.World
  retriever: lexical.LexicalRetriever

  def questions(
    self, split: str, count: int, seed: int
  ) -> Sequence[types.Question]:
    """Returns the training stream.

    Args:
      split: split of the world, such as "train".
      count: number of questions.
      seed: seed of their order.
    """
    return self.world.questions(split, count, seed)

  def evaluation_questions(
    self, datasets: Sequence[str] = (), per_dataset: int = 0, *, split: str = ""
  ) -> list[types.Question]:
    """Returns evaluation questions; a smaller set is a prefix of a larger one.

    Args:
      datasets: "world" or nothing, because the world is the only dataset.
      per_dataset: number of questions; 0 returns 1000 (600 of "dev").
      split: a split of the world; "" is "held-out".

    Raises:
      ValueError: a dataset or the split is unknown.
    """
    if unknown := set(datasets) - {"world"}:
      raise ValueError(
        f"Dataset {min(unknown)!r}: data.source 'world' has only 'world'; "
        "prepared ones need data.source=prepared and data.path."
      )
    return self.world.evaluation_questions(per_dataset, split or "held-out")


def source(config: config_lib.ExperimentConfig) -> Source:
  """Returns the source of questions, and of passages if it brings them.

  Raises:
    ValueError: the source is missing, or `retrieval.kind` does not fit it.
  """
  kind = config.retrieval.kind
  match config.data.source:
    case "world":
      return world_source(config.data, kind)
    case "prepared":
      if not config.data.path:
        raise ValueError(
          "data.path: found nothing, expected a folder of `anysearch "
          "prepare_data` for data.source 'prepared', or --questions=FILE of "
          "`anysearch evaluate`."
        )
      if kind == "lexical":
        raise ValueError(
          "retrieval.kind: found 'lexical', which searches the passages that "
          "come with the questions; prepared ones bring none. Build an index "
          "(anysearch build_index) and name it by retrieval.kind=index "
          "retrieval.index=FOLDER, or a server by retrieval.kind=http "
          "retrieval.url=URL."
        )
      from anysearch_jax.data import prepared

      is_file = pathlib.Path(config.data.path).is_file()
      source_class = prepared.QuestionFile if is_file else prepared.Prepared
      return source_class(config.data.path)
    case plugin:
      if not plugins.is_name(plugin):
        raise ValueError(
          f"data.source: found {plugin!r}, expected 'world', 'prepared' or "
          "file.py:NAME."
        )
      from anysearch_jax.data import prepared

      return prepared.OwnQuestions(plugin)


def world_source(data: config_lib.DataConfig, retriever: str) -> WorldSource:
  """Returns the generated world, for a retriever of the kind `retriever`.

  Raises:
    ValueError: another retriever or a folder is named.
  """
  if retriever != "lexical" and not plugins.is_name(retriever):
    raise ValueError(
      f"retrieval.kind: found {retriever!r} with data.source 'world', whose "
      "questions are each of one of many small corpora that nothing else "
      "holds; expected 'lexical', which searches them, or one of your own "
      "(path/to/file.py:NAME). To ask about documents of yours, leave --config "
      "out and name --documents=FOLDER; to train on prepared questions, start "
      "from configs/own_data.py."
    )
  if data.path:
    raise ValueError(
      f"data.path: found {data.path!r} with data.source 'world', which reads "
      "no folder; expected data.source=prepared, or no path."
    )
  from anysearch_jax.retrieval import (
    lexical,  # Imported late: computes with JAX at import.
  )

  world = generated_world(data)
  lexical_retriever = lexical.LexicalRetriever(
    world.corpus, reads=world.searched
  )
  return WorldSource(world, lexical_retriever)


@functools.cache
def generated_world(data: config_lib.DataConfig) -> world_lib.World:
  """Returns the generated world."""
  # Imported late, because it computes with JAX at import.
  from anysearch_jax.world import world as world_lib

  return world_lib.World(data.world_seed, data.world_reliability)


@contextlib.contextmanager
def program(
  config: config_lib.ExperimentConfig,
) -> Iterator[driver.Player | None]:
  """Opens the program that plays the episodes; None if there is none.

  Raises:
    ValueError: there is no such program.
  """
  if not config.agents.program:
    yield None
    return
  from anysearch_jax.sessions import player  # Imports the HTTP server.

  opened = player.ProgramPlayer(config.agents, config.sampling)
  try:
    yield opened
  finally:
    opened.close()


def provenance(
  config: config_lib.ExperimentConfig,
  retriever: typing.Any,
  questions: Sequence[types.Question],
) -> dict[str, typing.Any]:
  """Returns the inputs of a run with their hashes, and package versions.

  Args:
    config: configuration of the run.
    retriever: None in a process that samples nothing.
    questions: the questions that the run trains on.
  """
  question_source = {"source": config.data.source, "split": config.data.split}
  packages = ("jax", "flax", "optax", "orbax-checkpoint", "transformers")
  return {
    "policy": policy(config.policy),
    "questions": question_source | questions_digest(questions),
    "evidence": _evidence(config.method.name, questions),
    "world": world(config.data),
    "retriever": None
    if retriever is None
    else retriever.identity(sorted({q.corpus for q in questions})),
    "own": user_code(config),
    "prompts": prompts(config.episode),
    "packages": {name: importlib.metadata.version(name) for name in packages},
  }


def questions_digest(questions: Sequence[types.Question]) -> dict[str, object]:
  """Returns the number of questions, and the hash of their texts."""
  digest = hashlib.sha256()
  for q in questions:
    text = json.dumps([q.id, q.text, *q.golden_answers])
    digest.update(text.encode() + b"\n")
  return {"count": len(questions), "sha256": digest.hexdigest()}


def _evidence(
  method: str, questions: Sequence[types.Question]
) -> dict[str, object] | None:
  """Returns the hash of the evidence that rewards of searches compare with."""
  from anysearch_jax.data import evidence
  from anysearch_jax.methods import systems  # Imports JAX.

  if systems.get(method).steps is None:
    return None
  digest = hashlib.sha256()
  for q in questions:
    digest.update(json.dumps(evidence.of_metadata(q.metadata)).encode())
  return {"sha256": digest.hexdigest()}


def world(data: config_lib.DataConfig) -> dict[str, object] | None:
  """Names the generated world; None for other people's questions."""
  if data.source != "world":
    return None
  return generated_world(data).identity


def policy(folder: str) -> dict[str, object]:
  """Identifies a policy by the hash of its weights, and names its folder."""
  from anysearch_jax.policy import tensor_files  # Imports JAX.

  return {"folder": folder, "sha256": tensor_files.digest(folder)}


def prompts(episode: config_lib.EpisodeConfig) -> dict[str, object] | None:
  """Names an environment, the file of its texts and their hash.

  `budget` has the same of `episode.budget_file`, if it is set. None for an
  environment without such a file, as a user's system has.
  """
  from anysearch_jax.environment import units
  from anysearch_jax.methods import systems  # Imports JAX.

  texts = systems.texts(episode)
  if texts is None:
    return None
  texts_record: dict[str, object] = {
    "environment": episode.prompts,
    "file": texts.file,
    "sha256": texts.sha256,
  }
  if episode.budget_file:
    env = systems.of_episode(episode)
    budget_hash = (
      units.texts(env.units).sha256 if env.states_caps else units.SILENT
    )
    texts_record["budget"] = {
      "file": episode.budget_file,
      "sha256": budget_hash,
    }
  return texts_record


# Settings that name a user's own code, as `module:NAME` or `file.py:NAME`, and
# what that has to be.
OWN = {
  "method.name": "a system, anysearch_jax.Method(...)",
  "reward.function": "a function (outcomes, config)",
  "episode.prompts": "a system, anysearch_jax.Method(...)",
  "method.judge": "a function (trajectory), which returns a system's measures",
  "retrieval.kind": "a function (config), which returns a retriever",
  "search.tools": "a function (config), which returns a tool's retriever",
  "data.source": "a function (split), which returns questions",
  "agents.program": "a function (task), which plays an episode",
}


def user_code(config: config_lib.ExperimentConfig) -> dict[str, dict[str, str]]:
  """Returns the names and file hashes of the user's own code, by setting."""
  hashes_by_setting = {}
  for setting in OWN:
    group, _, field = setting.partition(".")
    value = getattr(getattr(config, group), field)
    names = {setting: value}
    if isinstance(value, tuple):  # TOOL=NAME, of each tool.
      pairs = [assignment.split("=", 1) for assignment in value]
      names = {f"{setting}.{tool}": name for tool, name in pairs}
    for key, name in names.items():
      name, _, environment = name.partition("#")
      # An environment of the run's own system is in its file.
      if environment and name == config.method.name:
        continue
      if key == "agents.program" and any(map(str.isspace, name)):
        continue  # A command.
      if plugins.is_name(name):
        plugin = plugins.load(
          name, setting=key, expected=OWN[setting], fits=lambda _: True
        )
        hashes_by_setting[key] = {"name": name, "sha256": plugin.sha256}
  return hashes_by_setting
