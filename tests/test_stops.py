"""Stop texts: which tokens halt a row, and where a turn is cut."""

from __future__ import annotations

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from anysearch_jax.rollout import stops

STOPS = ("</search>", "</answer>")


def halting(texts, ends=(), *, vocab_size=None):
  return stops.halting_tokens(
    texts, STOPS, ends, vocab_size=vocab_size or len(texts)
  )


@pytest.mark.parametrize(
  ("text", "halts"),
  [
    (">", True),
    (">\n", True),
    (">Ċ", True),  # A byte-level alphabet's newline.
    ("</search>", True),
    ("</answer>", True),
    ("h>", True),
    ("wer>.", True),
    ("/search>x", True),
    ("x</search>y", True),
    ("search", False),
    ("</search", False),
    (" >", False),
    ("Ġ>", False),
    ("x>", False),
    ("<", False),
    ("<search>", False),
    ("", False),
  ],
)
def test_a_token_halts_when_it_could_complete_a_stop(text, halts):
  assert halting([text])[0] == halts


def test_end_of_turn_tokens_halt_and_the_padded_vocabulary_does_not():
  halts = halting(["a", "b", ">"], {1, 99}, vocab_size=5)
  np.testing.assert_array_equal(halts, [False, True, True, False, False])


@st.composite
def _cut_texts(draw):
  """A text with a stop in it, cut into pieces anywhere."""
  some = st.text("</searchnw> \n", max_size=12)
  text = draw(some) + draw(st.sampled_from(STOPS)) + draw(some)
  cuts = draw(st.sets(st.integers(1, len(text) - 1)))
  edges = [0, *sorted(cuts), len(text)]
  return [text[i:j] for i, j in zip(edges, edges[1:])]


@hypothesis.given(_cut_texts())
def test_the_token_that_completes_a_stop_halts_however_text_is_cut(pieces):
  halts = halting(pieces)
  for i, halt in enumerate(halts):
    before, now = "".join(pieces[:i]), "".join(pieces[: i + 1])
    if stops.cut(now, STOPS) is not None:
      assert stops.cut(before, STOPS) is None
      assert halt
      return
  raise AssertionError("a text with a stop in it was never cut")


@hypothesis.given(st.text("</searchnw>x", max_size=12))
def test_no_other_token_halts(text):
  could_complete = any(
    stop in stop[:i] + text for stop in STOPS for i in range(len(stop))
  )
  assert halting([text])[0] == could_complete


@pytest.mark.parametrize(
  ("text", "expected"),
  [
    ("", None),
    ("a</search", None),
    ("a</search>", "a</search>"),
    ("a</search>\n b", "a</search>"),
    ("a</answer>b</search>", "a</answer>"),
    ("a</search></search>", "a</search>"),
    ("</Search>", None),
  ],
)
def test_cut_keeps_the_first_stop_whole(text, expected):
  assert stops.cut(text, STOPS) == expected


def test_real_tokenizers_halt_where_a_tag_may_end(real_tokenizer):
  texts = real_tokenizer.token_texts()
  halts = halting(texts, real_tokenizer.end_of_turn_ids)
  assert len(halts) == real_tokenizer.vocab_size
  closing = np.array([text.startswith(">") for text in texts])
  assert halts[closing].all()
  # Enough to know a wrong rule by: every row stop costs a look by the host.
  assert 260 <= halts.sum() <= 280
  for text in ("x</search>", "x </search>\n", "x\n</answer>", "。</answer>"):
    ids = real_tokenizer.encode(text)
    complete = next(
      i
      for i in range(1, len(ids) + 1)
      if stops.cut(real_tokenizer.decode(ids[:i]), STOPS) is not None
    )
    assert halts[ids[complete - 1]], (text, ids)
