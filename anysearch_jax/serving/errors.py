"""Errors in the form of OpenAI's API."""

from __future__ import annotations

from typing import Any


class RequestError(Exception):
  """A request is refused.

  Args:
    status: HTTP status.
    message: what was found, what was expected, what to do.
    param: the field of the request that is at fault, if one is.
    code: for programs, such as `model_not_found`.
    retry_after: seconds after which the client may try again.
  """

  def __init__(
    self,
    status: int,
    message: str,
    *,
    param: str | None = None,
    code: str | None = None,
    retry_after: int | None = None,
  ):
    super().__init__(message)
    self.status, self.param, self.code = status, param, code
    self.retry_after = retry_after

  @property
  def headers(self) -> dict[str, str]:
    """The headers of the response."""
    if self.retry_after is None:
      return {}
    return {"retry-after": str(self.retry_after)}

  def body(self) -> dict[str, Any]:
    """The JSON of the response."""
    return {
      "error": {
        "message": str(self),
        "type": _type(self.status),
        "param": self.param,
        "code": self.code,
      }
    }


def _type(status: int) -> str:
  if status == 401:
    return "authentication_error"
  if status == 429:
    return "rate_limit_error"
  return "invalid_request_error" if status < 500 else "server_error"


def refuse(param: str, found: object, expected: str) -> RequestError:
  """Returns the error of a field that cannot be honoured."""
  shown = repr(found)
  shown = shown if len(shown) <= 80 else f"{shown[:80]}..."
  return RequestError(
    400,
    f"{param}: found {shown}, expected {expected}.",
    param=param,
    code="invalid_value",
  )
