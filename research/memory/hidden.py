"""What a frozen policy computes where it decides: the inputs of `decisions`.

    python -m research.memory.hidden --chains=R/forced \
        --policy=R/warm_start/policy --output=R/hidden

The deepest chain of a question has all its decisions: the tokens that follow
`<think>`. Writes the hidden state before each, after the last norm, in parts of
`_PART` questions; the same command writes those that are missing. `head.npz`
is the difference of the rows of "Search" and "Answer" in the output projection:
its product with a state is the policy's own log-odds of searching.
"""

from __future__ import annotations

import itertools
import pathlib
import sys
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

import anysearch_jax as aj
from research.memory import chains as chains_lib
from research.memory import forced, memories

_PART = 100  # Questions of a file.
_MULTIPLE = 128  # Of the lengths that are compiled.
_HEAD = "head.npz"


class Decisions(NamedTuple):
  """The chain of a question, and where it decides.

  Attributes:
    token_ids: int `[T]`.
    places: positions of the last token before each decision.
  """

  token_ids: list[int]
  places: list[int]


def decisions(row: chains_lib.Row, opened: Sequence[int]) -> Decisions:
  """Returns the decisions of a chain, one for each charged search.

  Args:
    row: an episode of `forced`.
    opened: the tokens of `<think>`.

  Raises:
    ValueError: a turn does not begin with them.
  """
  token_ids = row["tokens"]["ids"]
  runs = row["tokens"]["authors"]
  ends = list(itertools.accumulate(count for _, count in runs))
  starts = [
    end - count
    for (author, count), end in zip(runs, ends, strict=True)
    if author == "model"
  ]
  places = []
  for observation in row["observations"]:
    start = starts[observation["turn"]]
    if token_ids[start : start + len(opened)] != list(opened):
      raise ValueError(
        f"{row['question_id']}: found a turn without {forced.OPENED} at its "
        "beginning, expected the episodes of research/memory/forced.py."
      )
    places.append(start + len(opened) - 1)
  return Decisions(token_ids, places)


def opened_tokens(codec: aj.Tokenizer) -> tuple[list[int], int, int]:
  """Returns the tokens of `<think>`, and the first of both decisions.

  Raises:
    ValueError: the tokenizer joins `<think>` with the decision.
  """
  opened = codec.encode(forced.OPENED)
  firsts = []
  for decision in (memories.SEARCH, memories.ANSWER):
    token_ids = codec.encode(forced.OPENED + decision)
    if token_ids[: len(opened)] != opened:
      raise ValueError(
        f"{forced.OPENED}{decision}: found one token over both words, expected "
        "a tokenizer that separates them."
      )
    firsts.append(token_ids[len(opened)])
  search, answer = firsts
  if search == answer:
    raise ValueError(
      f"{memories.SEARCH} and {memories.ANSWER}: found the same first token, "
      "expected two."
    )
  return opened, search, answer


def states(
  policy: aj.Policy, some: Sequence[Decisions], *, depth: int, dtype: str
) -> np.ndarray:
  """Returns the states before decisions, float32 `[N, depth, H]`; 0 if none.

  Args:
    policy: the frozen policy.
    some: decisions of N chains.
    depth: the largest number of decisions.
    dtype: of the computation.
  """
  a = policy.architecture
  compute = aj.decoder.Compute(dtype=jnp.dtype(dtype))

  @jax.jit
  def forward(tokens: jax.Array, places: jax.Array) -> jax.Array:
    positions = jnp.arange(tokens.shape[1])[None]
    hidden = aj.decoder.forward(
      policy.params,
      a,
      tokens,
      positions,
      jnp.ones_like(tokens),
      compute=compute,
    )
    return hidden[0, places].astype(jnp.float32)

  out = np.zeros((len(some), depth, a.d_model), np.float32)
  for row, own in enumerate(some):
    # What follows a position does not change its state.
    length = -(-len(own.token_ids) // _MULTIPLE) * _MULTIPLE
    tokens = np.zeros((1, length), np.int32)
    tokens[0, : len(own.token_ids)] = own.token_ids
    places = np.zeros(depth, np.int32)
    places[: len(own.places)] = own.places
    values = np.asarray(forward(tokens, places))
    out[row, : len(own.places)] = values[: len(own.places)]
  return out


def read(folder: str, split: str, ids: Sequence[str]) -> np.ndarray:
  """Returns the states of the questions of a split, float32 `[N, D, H]`.

  Raises:
    ValueError: the folder has not all of these questions.
  """
  parts = []
  read_ids: list[str] = []
  for path in sorted(pathlib.Path(folder).glob(f"{split}-*.npz")):
    with np.load(path) as part:
      parts.append(part["states"])
      read_ids += part["ids"].tolist()
  if tuple(read_ids) != tuple(ids):
    raise ValueError(
      f"{folder}: found the states of {len(read_ids)} questions of {split}, "
      f"expected those of the {len(ids)} chains; run research.memory.hidden."
    )
  return np.concatenate(parts)


def read_head(folder: str) -> np.ndarray:
  """Returns the policy's own head, float32 `[H]`."""
  with np.load(pathlib.Path(folder) / _HEAD) as file:
    return file["head"]


def _save(path: pathlib.Path, **arrays: np.ndarray) -> None:
  """Writes a file whole, or not at all."""
  beside = path.with_suffix(".writing")
  with beside.open("wb") as file:
    np.savez_compressed(file, allow_pickle=False, **arrays)
  beside.replace(path)


def define_flags() -> None:
  """Defines the command's flags; importing the module defines none."""
  flags.DEFINE_string("chains", None, "Folder of both splits.", required=True)
  flags.DEFINE_string("policy", None, "Folder of weights.", required=True)
  flags.DEFINE_string("output", None, "Folder to write to.", required=True)
  flags.DEFINE_string("dtype", "bfloat16", "Of the computation.")


def main(argv: Sequence[str]) -> None:
  if len(argv) > 1:
    raise app.UsageError(f"Unexpected argument {argv[1]!r}.")
  f = flags.FLAGS
  output = pathlib.Path(f.output)
  output.mkdir(parents=True, exist_ok=True)
  try:
    policy = aj.load_policy(f.policy)
    opened, search, answer = opened_tokens(policy.tokenizer)
    head = aj.decoder.head(policy.params)
    _save(output / _HEAD, head=np.asarray(head[search] - head[answer]))
    for split in chains_lib.SPLITS:
      path = pathlib.Path(f.chains) / split / memories.EPISODES
      rows = list(aj.read_episodes(path))
      depth = max(row["seed"] for row in rows)
      deepest = sorted(
        (row for row in rows if row["seed"] == depth),
        key=lambda row: row["question_id"],
      )
      for start in range(0, len(deepest), _PART):
        part = deepest[start : start + _PART]
        path = output / f"{split}-{start:05d}.npz"
        if path.is_file():
          continue
        ids = np.array([row["question_id"] for row in part])
        some = [decisions(row, opened) for row in part]
        made = states(policy, some, depth=depth, dtype=f.dtype)
        _save(path, ids=ids, states=made)
        print(f"written: {path}", flush=True)
  except ValueError as error:
    sys.exit(f"research.memory.hidden: {error}")


if __name__ == "__main__":
  define_flags()
  app.run(main)
