"""Turns that were not sampled, as an engine returns them."""

from __future__ import annotations

from anysearch_jax import types


def generation(
  turn_text: str, request: types.GenerateRequest, codec: types.TextCodec
) -> types.Generation:
  """Returns a text as a turn whose tokens have log-probability 0.

  It is cut after its first stop text, and to `max_tokens`; without a stop text
  it gets an end-of-turn token.

  Args:
    turn_text: the turn.
    request: what the turn answers.
    codec: encodes and decodes the tokens.
  """
  text = request.cut(turn_text)
  finish = types.Finish.STOP
  if text is None:
    text = turn_text
    finish = types.Finish.END_OF_TURN
  ids = codec.encode(text)
  if finish is types.Finish.END_OF_TURN:
    ids.append(min(codec.end_of_turn_ids))
  if len(ids) > request.max_tokens:
    ids = ids[: request.max_tokens]
    finish = types.Finish.LENGTH
    text = codec.decode(ids)
  n = len(ids)
  return types.Generation(tuple(ids), (0.0,) * n, text, finish, (0,) * n)
