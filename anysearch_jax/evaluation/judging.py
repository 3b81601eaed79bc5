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
_FORMS = r"\*\*{}:\*\*\s*{}", r"\*\*{}\*\*:\s*{}", r"{}:\s*{}"
_SAMPLING = {"temperature": 0.7, "top_p": 0.8, "max_tokens": 4096}
_BIN = 100


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

  Without an answer `judged` is 0, or None if the episode failed. Raises
  RetrievalError if no reply comes in time.
  """
  if not row["answer"]:
    return {"judged": None if row["failed"] else 0, "confidence": None}
  asked = row["question"], row["answer"], row["golden_answers"][0]
  text = prompt.format(**dict(zip(_SLOTS["prompt"].needs, asked)))
  reply, _ = await endpoint.chat(model, text, **_SAMPLING)
  return verdict(reply) | {"judge_reply": reply}


def verdict(reply: str) -> dict[str, float | None]:
  """Returns `judged`, 0 or 1, and `confidence` in [0, 100], None if unknown."""

  def said(what: str) -> str:
    forms = (form.format(*what.split()) for form in _FORMS)
    found = (re.search(form, reply, re.IGNORECASE) for form in forms)
    return next((match[1].lower() for match in found if match), "")

  right, sure = said("correct (yes|no)"), said(r"confidence (\d+(?:\.\d+)?)")
  confidence = min(100.0, float(sure)) if right and sure else None
  return {"judged": int(right == "yes"), "confidence": confidence}


def calibration_error(
  confidence: np.ndarray, correct: np.ndarray
) -> float | None:
  """Returns the root mean square gap of confidence and accuracy, in [0, 1].

  Bins have 100 answers of similar confidence. As in the original, the last bin,
  of the 100 to 199 most confident answers, adds nothing; None without a bin.
  `confidence` is float `[N]` in [0, 100] or nan, `correct` 0 or 1.
  """
  known = ~np.isnan(confidence)
  n, bins = int(known.sum()), int(known.sum()) // _BIN - 1
  if bins < 0:
    return None
  pairs = np.stack([confidence[known] / 100, correct[known]])
  pairs = pairs[:, np.argsort(pairs[0])][:, : bins * _BIN]
  said, right = pairs.reshape(2, bins, _BIN).mean(axis=2)
  return float(np.sqrt(np.sum(_BIN / n * (said - right) ** 2)))
