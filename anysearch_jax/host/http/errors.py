"""Errors of calls to services."""

from __future__ import annotations

from anysearch_jax import types


class AnswerError(types.RetrievalError):
  """The service replied, with an error or with something invalid."""
