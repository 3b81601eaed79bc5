"""The retriever of a file of stages; see `retrieval.pipeline.spec`."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

from anysearch_jax import config as config_lib
from anysearch_jax import types
from anysearch_jax.config import values
from launch import retrieval_settings
from retrieval.pipeline import pipeline, rerankers, spec, stages

Open = Callable[[config_lib.RetrievalConfig], tuple[types.BatchRetriever, Any]]


def make(
  path: str | pathlib.Path,
  open_one: Open,
  *,
  devices: Sequence[Any] | None = None,
) -> pipeline.PipelineRetriever:
  """Opens the retrievers and rerankers of a file of stages.

  Args:
    path: the TOML file; folders in it are relative to the working directory.
    open_one: opens a retriever, and returns it with its identity.
    devices: JAX devices for rerankers; None: the CPU.

  Raises:
    ValueError: a stage is invalid, or a part of it cannot be opened.
  """
  read = spec.read(path)
  # All are checked before the first is opened, which may take minutes.
  configs = {s.name: config(path, s) for s in read if s.kind == "retrieve"}
  made: list[stages.Stage] = []
  for stage in read:
    try:
      if stage.kind == "retrieve":
        made.append(stages.Retrieve(stage, *open_one(configs[stage.name])))
      elif stage.kind == "rerank":
        made.append(stages.Rerank(stage, _reranker(stage, devices)))
      else:
        made.append(stages.Cut(stage))
    except ValueError as error:
      raise ValueError(f"{path}, stage {stage.name!r}: {error}") from error
  return pipeline.PipelineRetriever(made)


def config(
  path: str | pathlib.Path, stage: spec.Stage
) -> config_lib.RetrievalConfig:
  """Returns the configuration of a stage's retriever.

  Raises:
    ValueError: it is invalid, or has what only a whole run can have.
  """
  where = f"{path}, stage {stage.name!r}"
  try:
    made = values.from_dict(
      config_lib.RetrievalConfig, stage.options, path="retrieve"
    )
    retrieval_settings.validate(made)
  except ValueError as error:
    raise ValueError(f"{where}: {error}") from error
  if made.kind in ("lexical", "pipeline"):
    raise ValueError(
      f"{where}: found kind {made.kind!r}; expected a retriever of a corpus or "
      "of the web."
    )
  for field in ("log", "simulated", "refined"):
    if getattr(made, field):
      raise ValueError(
        f"{where}: found {field} = {getattr(made, field)!r}; expected it in "
        "the configuration of the run, not in a stage."
      )
  return made


def longest(path: str | pathlib.Path) -> float:
  """Returns the most seconds of a search: its stages' deadlines in turn."""
  read = spec.read(path)
  first = max(stage.deadline for stage in read if stage.kind == "retrieve")
  return first + sum(s.deadline for s in read if s.kind == "rerank")


def configs(path: str | pathlib.Path) -> list[config_lib.RetrievalConfig]:
  """Returns those of a file's retrievers; raises ValueError as `make`."""
  return [config(path, s) for s in spec.read(path) if s.kind == "retrieve"]


def _reranker(
  stage: spec.Stage, devices: Sequence[Any] | None
) -> stages.Reranker:
  options = dict(stage.options)
  if "model" in options:
    for key in ("name", "key_variable", "batch"):
      if options.get(key):
        raise ValueError(f"found {key} with a model; expected it with a url.")
    from retrieval.encoder import cross_encoder

    model = cross_encoder.CrossEncoder.load(
      options["model"], max_tokens=options.get("max_tokens"), devices=devices
    )
    # Now, because the first searches have deadlines.
    model.compile()
    return rerankers.LocalReranker(model)
  if "max_tokens" in options:
    raise ValueError(
      "found max_tokens with a url; expected it with a model, because a server "
      "has its own."
    )
  from anysearch_jax.host.http import calls
  from retrieval.pipeline import served

  return served.ServedReranker(
    options["url"],
    model=options.get("name", ""),
    batch=options.get("batch", served.BATCH),
    key_variable=options.get("key_variable", ""),
    patience=dataclasses.replace(calls.DEFAULT, deadline=stage.deadline),
  )
