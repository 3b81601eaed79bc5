"""The passages that a trajectory's searches showed, read from its spans."""

from __future__ import annotations

import re

from anysearch_jax import types
from anysearch_jax.environment import protocol

# Whatever a system puts around rank and title; the title stays.
_PASSAGE = re.compile(r"^Doc \d+[^\w\n]*(?:Title:)?(.*)$", re.M)


def shown(trajectory: types.Trajectory) -> tuple[tuple[str, ...], ...]:
  """Title and text of the passages of each information block.

  Only what the environment wrote counts. The n-th block answers the n-th
  charged search; the last search of a truncated episode may have none, because
  an observation that no turn can read is not recorded.

  Args:
    trajectory: any.

  Returns:
    A tuple for each block, in rank order: one string a passage.
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
