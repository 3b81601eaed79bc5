"""What retrieval raises where an answer cannot be had."""


class RetrievalError(Exception):
  """No answer: the service is out of reach, or what it says is not one."""


class AnswerError(RetrievalError):
  """The service answered, with an error or with what is not an answer."""


class MissError(RetrievalError):
  """A replay was asked for what was not recorded."""
