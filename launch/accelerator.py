"""Refuses to compute a policy of full size on a CPU that nobody asked for.

If the plug-in of a GPU or TPU fails to load, JAX computes on the CPU after a
warning, hundreds of times slower. That must not look like a slow run.
"""

from __future__ import annotations

from anysearch_jax.host import platforms
from anysearch_jax.policy import architecture as architecture_lib
from anysearch_jax.policy import parameters, table

# Parameters; the smallest policy that configs/ trains on a GPU has 494 million.
FULL_SIZE = 300_000_000


def problem(a: architecture_lib.Architecture) -> str:
  """Returns why a policy should not be computed here; "" if it may be."""
  import jax

  size = parameters.count(table.rows(a))
  if size < FULL_SIZE or jax.default_backend() != "cpu":
    return ""
  there = [p.upper() for p in ("cuda", "tpu") if platforms.has_device(p)]
  has = f"this machine has a {' and a '.join(there)} device" if there else ""
  return (
    f"found a policy of {size / 1e9:.1f} billion parameters, and JAX computes "
    f"on the CPU{f', although {has}' if has else ''}; expected a GPU or a TPU"
  )


def check(a: architecture_lib.Architecture, *, allow: bool) -> None:
  """Refuses a policy of full size on a CPU.

  Args:
    a: architecture of the policy.
    allow: whether that is wanted, `--allow_cpu`.

  Raises:
    ValueError: JAX computes on the CPU.
  """
  if not allow and (found := problem(a)):
    raise ValueError(
      f"{found}. launch.doctor says which plug-in is missing or failed "
      "(docs/accelerators.md has the commands that install it); --allow_cpu "
      "computes on the CPU all the same."
    )
