"""Builds the parts that commands share: questions, provenance, JAX settings."""

from __future__ import annotations

import ctypes
import hashlib
import importlib.metadata
import json
import os
import pathlib
import tempfile
import typing
from collections.abc import Sequence

import numpy as np
from absl import logging

from anysearch_jax import config as config_lib
from anysearch_jax import types
from anysearch_jax.data import prepared as prepared_lib
from anysearch_jax.world import world as world_lib

if typing.TYPE_CHECKING:
  from retrieval import lexical


# The same for every evaluated policy, so that all see the same questions.
_QUESTION_SEED = 2024
# Smaller sets are the first questions of a shuffled pool of this size, so that
# evaluations of different sizes can be paired.
_POOL = {"train": 1000, "dev": 600, "held-out": 1000}


class Source(typing.NamedTuple):
  """The generated world: its questions and its passages."""

  world: world_lib.World
  retriever: lexical.LexicalRetriever

  def questions(
    self, split: str, count: int, seed: int
  ) -> Sequence[types.Question]:
    """Returns the training stream: `count` questions of a split."""
    return self.world.questions(split, count, seed)

  def evaluation_questions(
    self, datasets: Sequence[str] = (), each: int = 0, *, split: str = ""
  ) -> list[types.Question]:
    """Returns evaluation questions; a smaller set is a prefix of a larger one.

    Args:
      datasets: "world" or nothing, because the world is the only dataset.
      each: number of questions; 0 returns 1000 (600 of "dev").
      split: a split of the world; "" is "held-out".

    Raises:
      ValueError: a dataset or the split is unknown.
    """
    if others := set(datasets) - {"world"}:
      raise ValueError(
        f"Dataset {min(others)!r}: data.source 'world' has only 'world'; "
        "prepared ones need data.source=prepared and data.path."
      )
    split = split or "held-out"
    if split not in _POOL:
      raise ValueError(f"Found split {split!r}; expected {', '.join(_POOL)}.")
    pool = self.world.questions(split, max(each, _POOL[split]), _QUESTION_SEED)
    order = np.random.Generator(np.random.PCG64(_QUESTION_SEED)).permutation(
      len(pool)
    )
    return [pool[i] for i in order[: each or None]]


def source(
  config: config_lib.ExperimentConfig,
) -> Source | prepared_lib.Prepared:
  """Returns the source of questions, and of passages if it brings them.

  Raises:
    ValueError: the source is missing, or `retrieval.kind` does not fit it.
  """
  kind = config.retrieval.kind
  match config.data.source:
    case "world":
      if kind != "lexical":
        raise ValueError(
          f"retrieval.kind: found {kind!r} with data.source 'world', whose "
          "questions are each of one of many small corpora that nothing else "
          "holds; expected 'lexical', which searches them. Others answer "
          "prepared questions (data.source=prepared, data.path=FOLDER)."
        )
      if config.data.path:
        raise ValueError(
          f"data.path: found {config.data.path!r} with data.source 'world', "
          "which reads no folder; expected data.source=prepared, or no path."
        )
      # Imported late, because its library computes with JAX at import.
      from retrieval import lexical

      seed = config.data.world_seed
      world = world_lib.World(world_lib.WorldConfig(seed=seed))
      return Source(world, lexical.LexicalRetriever(world.corpus))
    case "prepared":
      if not config.data.path:
        raise ValueError(
          "data.path: found nothing, expected a folder of launch.prepare_data "
          "for data.source 'prepared'."
        )
      if kind == "lexical":
        raise ValueError(
          "retrieval.kind: found 'lexical', which searches the passages that "
          "come with the questions; prepared ones bring none. Build an index "
          "(launch.build_index) and name it by retrieval.kind=index "
          "retrieval.index=FOLDER, or a server by retrieval.kind=http "
          "retrieval.url=URL."
        )
      return prepared_lib.Prepared(config.data.path)
    case other:
      raise ValueError(
        f"data.source: found {other!r}, expected 'world' or 'prepared'."
      )


def provenance(
  config: config_lib.ExperimentConfig,
  retriever: typing.Any,
  questions: Sequence[types.Question],
) -> dict[str, dict[str, object]]:
  """Returns the inputs of a run with their hashes, and package versions."""
  digest = hashlib.sha256()
  for q in questions:
    text = json.dumps([q.id, q.text, *q.golden_answers])
    digest.update(text.encode() + b"\n")
  return {
    "policy": policy(config.policy),
    "questions": {
      "source": config.data.source,
      "split": config.data.split,
      "count": len(questions),
      "sha256": digest.hexdigest(),
    },
    "retriever": retriever.identity(sorted({q.corpus for q in questions})),
    "reward": reward(config.reward.function),
    "packages": {
      name: importlib.metadata.version(name)
      for name in ("jax", "flax", "optax", "orbax-checkpoint", "transformers")
    },
  }


def policy(folder: str) -> dict[str, object]:
  """Identifies a policy by the hash of its weights, and names its folder."""
  from anysearch_jax.policy import tensor_files  # Imports JAX.

  return {"folder": folder, "sha256": tensor_files.digest(folder)}


def reward(function: str) -> dict[str, object] | None:
  """Returns a reward function by its source; None for the system's own."""
  from anysearch_jax.methods import own_reward  # Imports JAX.

  if not function:
    return None
  return {"function": function, "sha256": own_reward.load(function).sha256}


def setup_jax(*, threads: int, cache: str) -> None:
  """Sets up JAX; call before JAX computes anything.

  Args:
    threads: 1 restricts this process to one CPU thread; any other value leaves
      the choice to XLA.
    cache: folder of compiled programs, shared by processes; "" disables it.
  """
  if threads == 1:
    flags = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = (
      f"{flags} --xla_cpu_multi_thread_eigen=false "
      "intra_op_parallelism_threads=1"
    ).strip()
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
      os.environ.setdefault(name, "1")
  # By default JAX reserves 75% of a GPU; `launch.plan` assumes this share:
  # https://docs.jax.dev/en/latest/gpu_memory_allocation.html
  os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")
  _keep_freed_memory()
  import jax  # Reads the flags above.

  if cache and _takes_files(folder := pathlib.Path(cache).absolute()):
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)


def _takes_files(folder: pathlib.Path) -> bool:
  """Returns whether a folder can hold compiled programs; warns if not."""
  try:
    folder.mkdir(parents=True, exist_ok=True)
    tempfile.TemporaryFile(dir=folder).close()
  except OSError as error:
    logging.warning(
      "--cache: found no place for compiled programs at %s (%s); each start "
      "compiles them again. Name a folder that can be written to.",
      folder,
      error.strerror,
    )
    return False
  return True


def _keep_freed_memory() -> None:
  """Makes glibc reuse freed memory instead of returning it to the kernel.

  XLA allocates its temporaries anew for each call. Above 32 MB glibc serves
  them by mmap, which costs a page fault for every page and doubled the time of
  a train step. Without glibc this does nothing. The options are described at
  https://man7.org/linux/man-pages/man3/mallopt.3.html
  """
  try:
    mallopt = ctypes.CDLL(None).mallopt
  except (AttributeError, OSError, TypeError):
    return
  trim_threshold, mmap_max, arena_max = -1, -4, -8  # From glibc's malloc.h.
  mallopt(trim_threshold, 2**31 - 1)
  mallopt(mmap_max, 0)
  mallopt(arena_max, 1)  # One arena, so threads reuse each other's memory.
