"""Reads the passages that a trajectory's searches showed from its spans."""

from __future__ import annotations

import re

from anysearch_jax import types
from anysearch_jax.environment import protocol

# Skips the marks that systems put around rank and title, and keeps the title.
_PASSAGE = re.compile(r"^Doc \d+[^\w\n]*(?:Title:)?(.*)$", re.M)


def shown(trajectory: types.Trajectory) -> tuple[tuple[str, ...], ...]:
  """Returns title and text of the passages of each information block.

  Only spans of the environment are read. The n-th block answers the n-th
  charged search. The last search of a truncated episode may have no block,
  because an observation is not recorded if no turn follows it.

  Args:
    trajectory: any trajectory.

  Returns:
    A tuple for each block; it holds one string for each passage, in rank
    order.
  """
  blocks = (
    protocol.last_content(span.text, "information")
    for span in trajectory.spans
    if span.author == types.Author.ENVIRONMENT
  )
  return tuple(
    tuple(text.strip() for text in _PASSAGE.findall(block))
    for block in blocks
    if block is not None
  )
