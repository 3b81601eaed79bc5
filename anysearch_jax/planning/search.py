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
  part: compilation.Part

  @property
  def words(self) -> str:
    """The varied settings, as command-line flags."""
    mesh, batch = self.config.mesh, self.config.batch
    return (
      f"--config.mesh.data={mesh.data} --config.mesh.fsdp={mesh.fsdp} "
      f"--config.mesh.tensor={mesh.tensor} "
      f"--config.batch.micro_batch_tokens={batch.micro_batch_tokens} "
      f"--config.batch.max_micro_batches={batch.max_micro_batches} "
      f"--config.batch.remat={batch.remat}"
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

  def attempt(
    mesh: config_lib.MeshConfig, size: int, remat: str
  ) -> Trial | str:
    """Compiles micro-batches of `size` tokens, or says why they do not fit."""
    count = math.ceil(tokens / size)
    batch = dataclasses.replace(
      config.batch,
      micro_batch_tokens=size,
      max_micro_batches=count,
      remat=remat,
    )
    candidate = dataclasses.replace(config, mesh=mesh, batch=batch)
    together = programs.programs(
      candidate,
      a,
      devices=planner.devices(mesh, target),
      micro_batches=count,
      segment=expected.tokens,
    )
    train = together[0]
    # Every rematerialization policy keeps the inputs of all layers.
    inputs = a.layers * (size // (mesh.data * mesh.fsdp)) * a.d_model
    inputs *= jnp.dtype(config.compute_dtype).itemsize
    if mesh.sequence_parallel:
      inputs //= mesh.tensor
    for one in together:
      least = _state(one, together) + (inputs if one is train else 0)
      if least > target.capacity:
        return (
          f"at least {plan.gib(least)} GiB a device by hand, in the {one.name}"
        )
    try:
      part = compilation.measure(train, together, target)
    except jax.errors.JaxRuntimeError as error:
      return f"did not compile: {str(error).splitlines()[0]}"
    if not part.fits(target):
      return f"{plan.gib(part.total)} GiB a device, does not fit"
    return Trial(candidate, part)

  def on_mesh(mesh: config_lib.MeshConfig) -> Iterator[Trial]:
    """Yields the fitting trial that recomputes least, for each micro-batch."""
    words = f"data {mesh.data} x fsdp {mesh.fsdp} x tensor {mesh.tensor}"
    row = mesh.data * mesh.fsdp * config.batch.row_lengths[-1]
    policies, size = REMAT, row
    try:
      while policies and size <= _MOST_ROWS * row:
        if size > row and size > tokens:
          return
        for i, remat in enumerate(policies):
          found = attempt(mesh, size, remat)
          said = found
          if isinstance(found, Trial):
            said = (
              f"{plan.gib(found.part.total)} GiB a device, "
              f"{found.part.tokens_per_second:,.0f} tokens/s predicted"
            )
          log(f"{words}, micro-batch {size:,}, remat {remat}: {said}")
          if isinstance(found, Trial):
            yield found
            # With twice the rows, activations double: a policy that did not
            # fit will not fit either.
            policies = policies[i:]
            break
        else:
          return
        size *= 2
    except ValueError as error:
      log(f"{words}: {error}")

  trials = [trial for mesh in meshes(config.mesh) for trial in on_mesh(mesh)]
  return max(
    trials, key=lambda t: t.part.tokens_per_second or 0.0, default=None
  )


def meshes(mesh: config_lib.MeshConfig) -> Iterator[config_lib.MeshConfig]:
  """Yields all shapes over the same devices, by increasing replication."""
  count = mesh.data * mesh.fsdp * mesh.tensor
  for data in _divisors(count):
    for tensor in _divisors(count // data):
      yield dataclasses.replace(
        mesh, data=data, fsdp=count // data // tensor, tensor=tensor
      )


def _divisors(n: int) -> list[int]:
  return [i for i in range(1, n + 1) if n % i == 0]


def _state(one: programs.Program, together: list[programs.Program]) -> int:
  """Returns a program's bytes without activations, but with gradients."""
  kinds = compilation.kinds(one)
  held = compilation.held(one, together)
  return sum([*kinds.values(), compilation.gradients(kinds), *held.values()])
