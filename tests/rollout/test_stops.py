"""Stop texts: which tokens halt a row, and where a turn is cut."""

from __future__ import annotations

import asyncio
import time

import hypothesis
import numpy as np
import small_engine
from hypothesis import strategies as st

from anysearch_jax import types
from anysearch_jax.rollout.jax_engine import turn

STOPS = ("</search>", "</answer>")


def halting(texts, ends=(), *, stop=STOPS, vocab_size=None):
  return turn.halting_tokens(
    texts, stop, ends, vocab_size=vocab_size or len(texts)
  )


def request(stop):
  return types.GenerateRequest(types.Address(0, 0, 0), 0, (1,), 1, stop)


def cut(text, stop=STOPS):
  return request(stop).cut(text)


def test_end_of_turn_tokens_halt_and_the_padded_vocabulary_does_not():
  halts = halting(["a", "b", ">"], {1, 99}, vocab_size=5)
  np.testing.assert_array_equal(halts, [False, True, True, False, False])


@st.composite
def _cut_texts(draw):
  """Draws a text with a stop text in it, cut into arbitrary pieces."""
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
    if cut(now) is not None:
      assert cut(before) is None
      assert halt
      return
  raise AssertionError("a text with a stop in it was never cut")


@hypothesis.given(st.text("</searchnw>x", max_size=12))
def test_no_other_token_halts(text):
  could_complete = any(
    stop in stop[:i] + text for stop in STOPS for i in range(len(stop))
  )
  assert halting([text])[0] == could_complete


def test_sets_of_stop_texts_that_share_a_bit_halt_at_the_tokens_of_each():
  finder = turn.Halting(
    small_engine.Tokenizer(), vocab_size=len(small_engine.TEXTS), stop=STOPS
  )
  sets = [(f"w{i}", "</search>") for i in range(30)]
  sets += [STOPS, (), ("x",), ("1",)]
  bits = [asyncio.run(finder.bit(stop)) for stop in sets]
  halts = finder.tokens
  asyncio.run(finder.bit(("x",)))
  assert len(set(bits)) == 32 and finder.tokens is halts
  codec = small_engine.Tokenizer()
  alone = [
    turn.halting_tokens(
      codec.token_texts(), stop, codec.end_of_turn_ids, vocab_size=len(halts)
    )
    for stop in sets
  ]
  for own, bit in zip(alone, bits, strict=True):
    sharers = [h for h, b in zip(alone, bits, strict=True) if b == bit]
    found = (halts & np.uint32(bit)) != 0
    np.testing.assert_array_equal(found, np.any(sharers, axis=0))
    assert found[own].all()


def _pieces(real_tokenizer):
  """Returns the token of each piece of UTF-8."""
  unprintable = [b for b in range(256) if not _stands_for_itself(b)]
  # Byte-level vocabularies spell printable bytes as they are and all others as
  # the characters from U+0100 on.
  byte = {chr(b): b for b in range(256) if _stands_for_itself(b)}
  byte |= {chr(256 + i): b for i, b in enumerate(unprintable)}
  texts = real_tokenizer.hf.convert_ids_to_tokens(
    list(range(real_tokenizer.vocab_size))
  )
  added = real_tokenizer.hf.added_tokens_decoder
  return {
    bytes(byte[c] for c in text): token
    for token, text in enumerate(texts)
    if token not in added
  }


def _stands_for_itself(b):
  return 33 <= b <= 126 or 161 <= b <= 172 or 174 <= b <= 255


def test_real_tokenizers_halt_where_a_stop_ends_however_it_is_cut(
  real_tokenizer,
):
  texts, pieces = real_tokenizer.token_texts(), _pieces(real_tokenizer)
  # The last ones are spelled differently from the decoded text.
  stops = ("</search>", "\n\n", "。")
  halts = {stop: halting(texts, stop=(stop,)) for stop in stops}

  @hypothesis.given(st.sampled_from(stops), st.data())
  @hypothesis.settings(max_examples=60)
  def halts_at_the_end(stop, data):
    some = st.text(stop + "x。\n", max_size=4)
    text = (data.draw(some) + stop + data.draw(some)).encode()
    ids, at, end = [], 0, None
    while at < len(text):
      fit = [n for n in range(1, 13) if text[at : at + n] in pieces]
      size = data.draw(st.sampled_from(fit))
      ids.append(pieces[text[at : at + size]])
      at += size
      end = cut(real_tokenizer.decode(ids), (stop,))
      if end is not None:
        break
    assert end is not None
    assert halts[stop][ids[-1]], (ids, real_tokenizer.decode(ids))

  halts_at_the_end()
  # No other token halts for ASCII, and few do for other characters: each halt
  # costs a check by the host.
  for stop in stops[:1]:
    known = stop.encode()
    assert set(np.flatnonzero(halts[stop])) == {
      token
      for piece, token in pieces.items()
      if any(known in known[:i] + piece for i in range(len(known)))
    }
  assert 0 < halts["。"].sum() < 0.02 * len(texts)


def test_turns_that_begin_together_find_their_tokens_once(monkeypatch):
  searched = []

  def counted(*arguments, **names):
    searched.append(arguments[1])
    time.sleep(0.01)
    return halting_tokens(*arguments, **names)

  halting_tokens = turn.halting_tokens
  monkeypatch.setattr(turn, "halting_tokens", counted)
  finder = turn.Halting(
    small_engine.Tokenizer(), vocab_size=len(small_engine.TEXTS), stop=STOPS
  )

  async def together():
    await asyncio.gather(*(finder.bit(("x",)) for _ in range(8)))

  asyncio.run(together())
  assert searched == [STOPS, ("x",)]
