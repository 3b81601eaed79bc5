"""Tests of a real encoder, if the variable ANYSEARCH_ENCODER names one.

It names the folder of any English retrieval model of the BERT family:
config.json, safetensors, tokenizer.json.
"""

from __future__ import annotations

import os

import numpy as np
import pytest

from retrieval.encoder import encoder as encoder_lib

FOLDER = os.environ.get("ANYSEARCH_ENCODER")
pytestmark = pytest.mark.skipif(
  not FOLDER, reason="ANYSEARCH_ENCODER names no folder of a real encoder"
)
# Questions that share few words with the passage that answers them.
PAIRS = {
  "who wrote the play about the prince of Denmark": "Hamlet\n"
  "Hamlet is a tragedy by William Shakespeare, set in Elsinore.",
  "how do green plants make their food": "Photosynthesis\n"
  "Photosynthesis turns sunlight, water and carbon dioxide into sugar.",
  "tallest mountain on earth": "Everest\n"
  "At 8,849 metres above the sea, Everest is higher than any other peak.",
  "which organ pumps blood": "Heart\n"
  "The heart is a muscle that drives the circulation of animals.",
  "first person to walk on the lunar surface": "Neil Armstrong\n"
  "Neil Armstrong stepped onto the Moon in July 1969.",
  "what is the money of Japan called": "Yen\n"
  "The yen is the official currency in Tokyo and the rest of the country.",
  "cause of tides in the sea": "Gravity of the Moon\n"
  "The pull of the Moon makes the ocean rise and fall twice a day.",
  "painter who cut off his own ear": "Vincent van Gogh\n"
  "Van Gogh, a Dutch artist, painted Sunflowers and The Starry Night.",
  "medicine that kills bacteria, found by accident": "Penicillin\n"
  "Fleming discovered the antibiotic penicillin in a mouldy dish.",
  "language spoken by most people in Brazil": "Portuguese\n"
  "Portuguese is an official tongue of nine states, from Lisbon to Rio.",
}


@pytest.fixture(scope="module")
def encoder():
  return encoder_lib.Encoder.load(FOLDER)


def test_vectors_are_those_of_transformers(torch, encoder):
  import transformers

  tokenizer = transformers.AutoTokenizer.from_pretrained(FOLDER)
  model = transformers.AutoModel.from_pretrained(
    FOLDER, dtype=torch.float32
  ).eval()
  settings = encoder.settings
  for texts, prefix, ours in (
    (PAIRS, settings.query_prefix, encoder.queries(list(PAIRS))),
    (
      PAIRS.values(),
      settings.passage_prefix,
      encoder.passages([*PAIRS.values()]),
    ),
  ):
    theirs = []
    for text in texts:
      row = tokenizer(
        prefix + text,
        truncation=True,
        max_length=settings.max_tokens,
        return_tensors="pt",
      )
      with torch.no_grad():
        hidden = model(**row).last_hidden_state[0]
      x = hidden[0] if settings.pooling == "cls" else hidden.mean(0)
      theirs.append((x / x.norm()).numpy())
    np.testing.assert_allclose(ours, np.stack(theirs), rtol=0, atol=1e-5)


def test_questions_find_their_passages(encoder):
  scores = encoder.queries(list(PAIRS)) @ encoder.passages([*PAIRS.values()]).T
  right = scores.argmax(1) == np.arange(len(PAIRS))
  assert right.sum() >= 0.8 * len(PAIRS)
