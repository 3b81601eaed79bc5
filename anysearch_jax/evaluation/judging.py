"""The judge of BrowseComp-Plus, as its scripts_evaluation/evaluate_run.py.

The shipped prompt is in our words.
"""

from __future__ import annotations

import pathlib
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from anysearch_jax.environment import wording
from anysearch_jax.host import openai_endpoint

_FILE = pathlib.Path(__file__).with_name("judge.toml")
_SLOTS = {"prompt": wording.Slots(("question", "response", "correct_answer"))}
# The original's patterns of a field, with its name and its value.
_FORMS = (r"\*\*{}:\*\*\s*{}", r"\*\*{}\*\*:\s*{}", r"{}:\s*{}")
_SAMPLING = {"temperature": 0.7, "top_p": 0.8, "max_tokens": 4096}
_BIN_SIZE = 100  # Answers of a bin of the calibration error.


def prompt(file: str) -> str:
  """Returns the prompt of a file, "" being the shipped one."""
  path = pathlib.Path(file or _FILE)
  return wording.read(path, _SLOTS, shipped=str(_FILE))["prompt"]


async def judge(
  row: Mapping[str, Any],
  endpoint: openai_endpoint.OpenAIEndpoint,
  model: str,
  prompt: str,
) -> dict[str, Any]:
  """Returns the `verdict` on an episode, and `judge_reply`.

  Without an answer `judged` is 0, or None if the episode failed.

  Args:
    row: the record of an episode.
    endpoint: the judge's server.
    model: the judge's name at this server.
    prompt: the text of `prompt`, with slots.

  Raises:
    RetrievalError: no reply came in time.
  """
  if not row["answer"]:
    return {"judged": None if row["failed"] else 0, "confidence": None}
  text = prompt.format(
    question=row["question"],
    response=row["answer"],
    correct_answer=row["golden_answers"][0],
  )
  reply, _ = await endpoint.chat(model, text, **_SAMPLING)
  return verdict(reply) | {"judge_reply": reply}


def verdict(reply: str) -> dict[str, float | None]:
  """Returns `judged`, 0 or 1, and `confidence` in [0, 100], None if unknown."""

  def field(name: str, pattern: str) -> str:
    for form in _FORMS:
      match = re.search(form.format(name, pattern), reply, re.IGNORECASE)
      if match:
        return match[1].lower()
    return ""

  correct = field("correct", "(yes|no)")
  percentage = field("confidence", r"(\d+(?:\.\d+)?)")
  confidence = None
  if correct and percentage:
    confidence = min(100.0, float(percentage))
  return {"judged": int(correct == "yes"), "confidence": confidence}


def calibration_error(
  confidence: np.ndarray, correct: np.ndarray
) -> float | None:
  """Returns the root mean square gap of confidence and accuracy, in [0, 1].

  Bins have 100 answers of similar confidence. As in the original, the last bin,
  of the 100 to 199 most confident answers, adds nothing.

  Args:
    confidence: float `[N]` in [0, 100]; nan where unknown.
    correct: `[N]`, 0 or 1.

  Returns:
    The error; None if fewer than 100 answers have a confidence.
  """
  has_confidence = ~np.isnan(confidence)
  n = int(has_confidence.sum())
  bins = n // _BIN_SIZE - 1
  if bins < 0:
    return None
  pairs = np.stack([confidence[has_confidence] / 100, correct[has_confidence]])
  pairs = pairs[:, np.argsort(pairs[0])][:, : bins * _BIN_SIZE]
  stated, accuracy = pairs.reshape(2, bins, _BIN_SIZE).mean(axis=2)
  return float(np.sqrt(np.sum(_BIN_SIZE / n * (stated - accuracy) ** 2)))
