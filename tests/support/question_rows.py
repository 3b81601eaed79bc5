"""A row of every question format, and the expected question.

They are in golden/question_rows.json, by the name of the data set.
"""

from __future__ import annotations

import json
import pathlib

from anysearch_jax.data import formats

_FILE = pathlib.Path(__file__).parents[1] / "golden" / "question_rows.json"


def _found(values):
  values["answers"] = tuple(values["answers"])
  return formats.RawQuestion(**values)


# A row, its format, and the expected question.
ROWS = {
  name: (each["row"], each["format"], _found(each["found"]))
  for name, each in json.loads(_FILE.read_text("utf-8")).items()
}


def trained(target, **columns):
  """Returns a row of Search-R1."""
  row = ROWS["Agentic-RAG"][0]
  truth = {"style": "rule", "ground_truth": target}
  return {**row, "question": None, "reward_model": truth, **columns}
