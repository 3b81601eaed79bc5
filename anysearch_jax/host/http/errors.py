"""Errors of retrieval."""


class RetrievalError(Exception):
  """There is no answer: the service is unreachable or its reply is invalid."""


class AnswerError(RetrievalError):
  """The service replied, with an error or with something invalid."""


class MissError(RetrievalError):
  """A replay was asked for an answer that was not recorded."""
