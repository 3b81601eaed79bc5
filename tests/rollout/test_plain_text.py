"""The codec without a vocabulary changes no text."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from anysearch_jax.rollout import plain_text

CODEC = plain_text.PlainText()


@given(st.lists(st.text(), max_size=5))
def test_decoding_gives_what_was_encoded(texts):
  ids = [i for text in texts for i in CODEC.encode(text)]
  assert CODEC.decode(ids) == CODEC.transcript(ids) == "".join(texts)
  assert np.array(ids, np.int32).tolist() == ids
  assert CODEC.end_of_turn_id not in ids


def test_a_token_is_four_ascii_characters_or_one_other():
  text = "The company was founded in 1946."
  assert len(CODEC.encode(text)) == len(text) // 4
  assert len(CODEC.encode("東京で")) == 3
  assert CODEC.decode([CODEC.end_of_turn_id]) == ""


def test_prompt_is_the_content_itself():
  text, ids = CODEC.render("Question: who?\n")
  assert text == CODEC.decode(ids) == "Question: who?\n"
