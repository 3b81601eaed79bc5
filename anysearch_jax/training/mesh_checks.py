"""Refuses meshes that cannot run, by the configuration alone."""

from __future__ import annotations

from anysearch_jax import config as config_lib


def check(c: config_lib.MeshConfig) -> None:
  """Checks that the devices are distinct and that their number fits the axes.

  Raises:
    ValueError: names the setting, its value and the expected values.
  """
  for name in ("trainer", "rollout"):
    indices = getattr(c, name)
    if len(set(indices)) < len(indices):
      raise ValueError(
        f"mesh.{name}: found {indices}, expected indices of devices from 0, "
        "each once."
      )
  devices = c.data * c.fsdp * c.tensor
  if c.trainer and devices % len(c.trainer):
    raise ValueError(
      f"mesh.trainer: found {len(c.trainer)} devices of each process for a "
      f"mesh of data {c.data} x fsdp {c.fsdp} x tensor {c.tensor} = {devices}; "
      "expected a number that divides it."
    )


def check_rows(c: config_lib.MeshConfig, batch: config_lib.BatchConfig) -> None:
  """Checks that sequence parallelism can cut every packed row evenly.

  Raises:
    ValueError: names a row length that the tensor axis does not divide.
  """
  uneven = [n for n in batch.row_lengths if n % c.tensor]
  if c.sequence_parallel and uneven:
    raise ValueError(
      f"mesh.sequence_parallel: found a row of {uneven[0]} tokens in "
      f"batch.row_lengths, expected multiples of mesh.tensor, {c.tensor}, over "
      "which positions are cut."
    )


def check_separate(level: int, mesh: config_lib.MeshConfig) -> None:
  """Checks that sampling and training, at the same time, share no devices.

  Args:
    level: `pipeline.async_level`, for the message.
    mesh: has the devices of both.

  Raises:
    ValueError: names a device that is in both.
  """
  trainer = set(mesh.trainer or range(mesh.data * mesh.fsdp * mesh.tensor))
  shared = trainer & set(mesh.rollout or trainer)
  if shared and len(trainer | set(mesh.rollout)) > 1:
    raise ValueError(
      f"pipeline.async_level: found {level} with device {min(shared)} both in "
      "mesh.trainer and in mesh.rollout; expected devices of their own, or one "
      "device for both: programs of several devices that start at the same "
      "time may wait for each other."
    )
