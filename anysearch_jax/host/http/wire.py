"""Reads replies of HTTP services: JSON, error messages, Retry-After."""

from __future__ import annotations

import datetime
import email.utils
import json
import math
from collections.abc import Mapping
from typing import Any

from anysearch_jax.host.http import errors, redaction

# Limit on the characters of an error message.
_LONGEST = 300


def parse(data: bytes, url: str, redact: redaction.Redactor) -> Any:
  """Parses an answer as strict JSON, without NaN and infinities.

  Raises:
    AnswerError: the answer is not JSON; the message quotes its beginning with
      keys redacted.
  """

  def refuse(name: str) -> None:
    raise ValueError(f"it says {name}")

  try:
    return json.loads(data, parse_constant=refuse)
  except (ValueError, RecursionError) as error:
    raise errors.AnswerError(
      f"{url}: found {redact.quote(data, 80)!r} ({error}), expected JSON."
    ) from None


def body(value: Any) -> bytes:
  """Encodes a request as JSON in ASCII.

  A policy can write half of a surrogate pair, which has no UTF-8 encoding but
  can be escaped in ASCII.
  """
  return json.dumps(value).encode("ascii")


def message(data: bytes, redact: redaction.Redactor) -> str:
  """Returns the message of an error reply for logs, with keys redacted.

  Services put it at different places: `error`, `message` or `detail`, possibly
  nested, or plain text.
  """
  try:
    value = json.loads(data)
  except (ValueError, RecursionError):
    value = None
  while isinstance(value, dict):
    value = next(
      (value[k] for k in ("error", "message", "detail") if k in value), None
    )
  text = value if isinstance(value, str) else data.decode(errors="replace")
  text = redact.quote(" ".join(text.split()), _LONGEST) or "no reason given."
  # Replaces terminal control characters and halves of surrogate pairs.
  return "".join(each if each.isprintable() else "\ufffd" for each in text)


def retry_after(headers: Mapping[str, str]) -> float:
  """Returns the seconds that the Retry-After header asks to wait, or 0.

  The header is a number of seconds or a date.
  """
  text = headers.get("retry-after", "")
  try:
    seconds = float(text)
  except ValueError:
    try:
      date = email.utils.parsedate_to_datetime(text)
      seconds = (date - datetime.datetime.now(date.tzinfo)).total_seconds()
    except (ValueError, OverflowError):
      return 0.0
  return seconds if 0 < seconds < math.inf else 0.0
