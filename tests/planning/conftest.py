"""Settings of the planner's tests."""

from __future__ import annotations

import planned
import pytest


@pytest.fixture(scope="module")
def optimized():
  """Plans are of the programs that users run."""
  with planned.optimized():
    yield
