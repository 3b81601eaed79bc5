"""Searches for the fastest train step that fits, by compiling candidates."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp

from anysearch_jax import config as config_lib
from anysearch_jax.planning import (
  compilation,
  plan,
  planner,
  program,
  programs,
  targets,
  whole_step,
)
from anysearch_jax.policy import architecture as architecture_lib

# From most memory and least recomputation to the opposite.
REMAT: tuple[str, ...] = ("none", "dots", "attention", "full")
# Most rows of a micro-batch on one device.
_MOST_ROWS = 8


@dataclasses.dataclass(frozen=True)
class Trial:
  """A candidate and its compiled train step."""

  config: config_lib.ExperimentConfig
  micro_batches: int
  part: plan.Part

  @property
  def words(self) -> str:
    """The varied settings, as command-line flags."""
    c = self.config
    return (
      f"--config.mesh.data={c.mesh.data} --config.mesh.fsdp={c.mesh.fsdp} "
      f"--config.mesh.tensor={c.mesh.tensor} "
      f"--config.batch.micro_batch_tokens={c.batch.micro_batch_tokens} "
      f"--config.batch.max_micro_batches={c.batch.max_micro_batches} "
      f"--config.batch.remat={c.batch.remat}"
    )


def best(
  config: config_lib.ExperimentConfig,
  a: architecture_lib.Architecture,
  target: targets.Target,
  *,
  micro_batches: int | None = None,
  expected: whole_step.Episodes | None = None,
  log: Callable[[str], None] = lambda line: None,
) -> Trial | None:
  """Returns the candidate that fits with most predicted tokens a second.

  Of sampling, only the bytes of its arrays are compared with the capacity.
  Candidates vary the shape of the mesh over the same number of devices, the
  rows of a micro-batch, and rematerialization; the tokens of an optimizer step
  stay the same. A candidate is not compiled if a lower bound of its memory
  exceeds the capacity, or if it keeps at least as much as one that did not fit.

  Args:
    config: the configuration to vary.
    a: the policy's architecture, without adapters.
    target: the hardware to plan for.
    micro_batches: of an optimizer step of `config`; by default as many as the
      episodes fill.
    expected: the episodes; by default those of `whole_step.episodes_of`.
    log: called with a sentence for each candidate.

  Returns:
    The best trial; None if no candidate fits.
  """
  expected = expected or whole_step.episodes_of(config)
  tokens = config.batch.micro_batch_tokens * (
    micro_batches or expected.micro_batches(config.batch)
  )
  search = _Search(config, a, target, tokens, expected.tokens, log)
  found: list[Trial] = []
  for mesh in meshes(config.mesh):
    try:
      found += search.on_mesh(mesh)
    except ValueError as error:
      log(f"{_mesh_words(mesh)}: {error}")
  return max(found, key=lambda t: t.part.tokens_per_second or 0.0, default=None)


@dataclasses.dataclass(frozen=True)
class _Search:
  """What all candidates of a search have in common.

  config: the configuration to vary. tokens: of an optimizer step. segment: of
  an episode. log: is called with a sentence for each candidate.
  """

  config: config_lib.ExperimentConfig
  a: architecture_lib.Architecture
  target: targets.Target
  tokens: int
  segment: int
  log: Callable[[str], None]

  def on_mesh(self, mesh: config_lib.MeshConfig) -> Iterator[Trial]:
    """Yields the fitting trial that recomputes least, for each micro-batch."""
    replicas = mesh.data * mesh.fsdp
    policies = REMAT
    rows = 1
    while policies and rows <= _MOST_ROWS:
      size = rows * replicas * self.config.batch.row_lengths[-1]
      if rows > 1 and size > self.tokens:
        return
      for i, remat in enumerate(policies):
        trial = self._try(mesh, size, remat)
        if trial is None:
          continue
        yield trial
        # With twice the rows, activations double: a policy that did not fit
        # will not fit either.
        policies = policies[i:]
        break
      else:
        return
      rows *= 2

  def _try(
    self, mesh: config_lib.MeshConfig, size: int, remat: str
  ) -> Trial | None:
    """Compiles one candidate; returns None if it does not fit or compile.

    Args:
      mesh: of the training devices.
      size: tokens of a micro-batch.
      remat: what the backward pass recomputes.
    """
    micro_batches = math.ceil(self.tokens / size)
    batch = dataclasses.replace(
      self.config.batch,
      micro_batch_tokens=size,
      max_micro_batches=micro_batches,
      remat=remat,
    )
    config = dataclasses.replace(self.config, mesh=mesh, batch=batch)
    words = f"{_mesh_words(mesh)}, micro-batch {size:,}, remat {remat}"
    found = programs.programs(
      config,
      self.a,
      devices=planner.devices(mesh, self.target),
      micro_batches=micro_batches,
      segment=self.segment,
    )
    train = next(p for p in found if "moments" in p.kinds)
    inputs = _layer_inputs(
      self.a, mesh, tokens=size, dtype=config.compute_dtype
    )
    for one in found:
      least = _state(one, found) + (inputs if one is train else 0)
      if least > self.target.capacity:
        self.log(
          f"{words}: at least {plan.gib(least)} GiB a device by hand, in the "
          f"{one.name}"
        )
        return None
    try:
      part = planner.measure(train, found, self.target)
    except jax.errors.JaxRuntimeError as error:
      self.log(f"{words}: did not compile: {str(error).splitlines()[0]}")
      return None
    if not part.fits(self.target):
      self.log(f"{words}: {plan.gib(part.total)} GiB a device, does not fit")
      return None
    self.log(
      f"{words}: {plan.gib(part.total)} GiB a device, "
      f"{part.tokens_per_second:,.0f} tokens/s predicted"
    )
    return Trial(config, micro_batches, part)


def meshes(mesh: config_lib.MeshConfig) -> Iterator[config_lib.MeshConfig]:
  """Yields all shapes over the same devices, by increasing replication."""
  count = mesh.data * mesh.fsdp * mesh.tensor
  for data in _divisors(count):
    for tensor in _divisors(count // data):
      yield dataclasses.replace(
        mesh, data=data, fsdp=count // data // tensor, tensor=tensor
      )


def _state(one: program.Program, together: list[program.Program]) -> int:
  """Returns a program's bytes without activations, but with gradients."""
  kinds = compilation.kinds(one)
  held = compilation.held(one, (p for p in together if p is not one))
  return sum([*kinds.values(), compilation.gradients(kinds), *held.values()])


def _layer_inputs(
  a: architecture_lib.Architecture,
  mesh: config_lib.MeshConfig,
  *,
  tokens: int,
  dtype: str,
) -> int:
  """Returns the bytes on a device of all layers' inputs to a micro-batch.

  Every rematerialization policy keeps these.
  """
  tokens //= mesh.data * mesh.fsdp
  if mesh.sequence_parallel:
    tokens //= mesh.tensor
  return a.layers * tokens * a.d_model * jnp.dtype(dtype).itemsize


def _mesh_words(mesh: config_lib.MeshConfig) -> str:
  return f"data {mesh.data} x fsdp {mesh.fsdp} x tensor {mesh.tensor}"


def _divisors(n: int) -> list[int]:
  return [i for i in range(1, n + 1) if n % i == 0]
