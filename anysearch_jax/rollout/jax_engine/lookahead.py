"""Guesses a row's next tokens from its own context, and keeps the right ones.

Queries and answers repeat names and phrases of the context. A guess copies what
followed the most recent earlier occurrence of the row's last tokens (prompt
lookup, a draft without a model: https://arxiv.org/abs/2304.04487). One step of
the policy over a row's last token and its guesses gives the logits at each of
them. Every position is then drawn with its own key, as without guesses, and a
draw counts while all guesses before it equal the draws before it. The guesses
therefore decide how many tokens a step gives, never which.

All functions have fixed shapes and take the rows of a call: R rows, a window of
their last W tokens, k guesses.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

# The last tokens of a row that an earlier occurrence should share; fewer, if no
# earlier place shares all of them.
LONGEST = 3
# Left of a row's first token in its window.
EMPTY = -1


def propose(window: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
  """Guesses the tokens that follow each row.

  Args:
    window: int `[R, W]`, each row's last tokens, the last one at the end;
      `EMPTY` before a shorter row's first.
    size: k, number of guesses.

  Returns:
    int `[R, k]` guesses, and bool `[R]`, whether the row's last token occurs
    earlier. Otherwise its guesses are tokens of the window without meaning.
    Of the earlier occurrences of the last token, the one counts that shares
    the most tokens before it with the end (`LONGEST` in all, at most), then
    the latest. Guesses that reach the end of the window repeat what lies
    between.
  """
  rows, width = window.shape
  if size == 0 or width == 1:
    return jnp.zeros((rows, size), jnp.int32), jnp.zeros(rows, bool)
  # How many tokens that end at each place, but the last, equal the last ones.
  same = jnp.ones((rows, width - 1), bool)
  length = jnp.zeros((rows, width - 1), jnp.int32)
  for i in range(min(LONGEST, width - 1)):
    earlier = jnp.pad(
      window[:, : width - 1 - i], ((0, 0), (i, 0)), constant_values=EMPTY
    )
    same &= earlier == window[:, width - 1 - i, None]
    length += same
  best = jnp.max(length * width + jnp.arange(width - 1), axis=1)
  place = best % width
  period = width - 1 - place
  at = place[:, None] + 1 + jnp.arange(size) % period[:, None]
  return jnp.take_along_axis(window, at, axis=1), best >= width


def accepted(
  drawn: jax.Array, guesses: jax.Array, guessed: jax.Array, halts: jax.Array
) -> jax.Array:
  """Returns how many of a step's draws count, int `[R]` in `[1, 1 + k]`.

  Args:
    drawn: int `[R, 1 + k]`, the draw after the row's last token and after each
      guess.
    guesses: int `[R, k]`.
    guessed: int `[R]`, number of guesses that the policy saw.
    halts: bool `[R, 1 + k]`, draws after which the row ends.
  """
  seen = jnp.arange(guesses.shape[1]) < guessed[:, None]
  right = (drawn[:, :-1] == guesses) & seen & ~halts[:, :-1]
  return 1 + jnp.sum(jnp.cumprod(right.astype(jnp.int32), axis=1), axis=1)


def shifted(window: jax.Array, drawn: jax.Array, count: jax.Array) -> jax.Array:
  """Returns `[R, W]` windows after the first `count[r]` draws of row r."""
  at = jnp.arange(window.shape[1]) + count[:, None]
  both = jnp.concatenate([window, drawn], axis=1)
  return jnp.take_along_axis(both, at, axis=1)


def put(
  found: jax.Array, drawn: jax.Array, at: jax.Array, count: jax.Array
) -> jax.Array:
  """Puts the first `count[r]` draws of row r of `[R, S]` from `at[r]` on."""
  column = jnp.arange(found.shape[1]) - at[:, None]
  for i in range(drawn.shape[1]):
    here = (column == i) & (i < count[:, None])
    found = jnp.where(here, drawn[:, i, None], found)
  return found
