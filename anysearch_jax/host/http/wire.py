"""What HTTP services write: JSON, the reasons of errors, how long to wait."""

from __future__ import annotations

import datetime
import email.utils
import json
import math
from collections.abc import Mapping
from typing import Any

from anysearch_jax.host.http import errors, redaction

# Of what an error says.
_LONGEST = 300


def parse(data: bytes, url: str, redact: redaction.Redactor) -> Any:
  """The JSON value of an answer; NaN and infinities are none.

  Raises:
    AnswerError: it is no JSON; its beginning is quoted without keys.
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
  """JSON of a request in ASCII: any text of a policy can be sent."""
  return json.dumps(value).encode("ascii")


def message(data: bytes, redact: redaction.Redactor) -> str:
  """What an error says, for logs, without keys; it has several shapes."""
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
  # Nothing that steers a terminal, and no half of a surrogate pair.
  return "".join(each if each.isprintable() else "\ufffd" for each in text)


def retry_after(headers: Mapping[str, str]) -> float:
  """Seconds that a busy service asks to wait, as a number or a date."""
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
