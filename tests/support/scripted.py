"""A scripted engine and retriever, and a tiny tokenizer, for tests.

The tokenizer has one id per character, except that `>\\n\\n` is one id. As with
real tokenizers, a stop text may therefore be completed by a token that extends
beyond it, and encoding a transcript again may differ from what was sampled.
Control tokens are also parsed in plain text, so a text that was not neutralised
is detected.
"""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from anysearch_jax import config as config_lib
from anysearch_jax import types
from anysearch_jax.environment import protocol
from anysearch_jax.host import loop
from anysearch_jax.methods import systems
from anysearch_jax.rollout import driver

USER, ASSISTANT, END = "<|user|>", "<|assistant|>", "<|end|>"
_PIECES = {USER: 1_200_001, ASSISTANT: 1_200_002, END: 1_200_003}
OVERHANG = 1_200_004  # ">\n\n"
END_ID = _PIECES[END]
_IDS = {**_PIECES, ">\n\n": OVERHANG}
_TEXTS = {OVERHANG: ">\n\n"} | dict.fromkeys(_PIECES.values(), "")
_SPLIT = re.compile("|".join(map(re.escape, _IDS)) + "|.", re.S)


class Codec:
  """A character tokenizer (`types.TextCodec`)."""

  end_of_turn_ids = frozenset({END_ID})
  control_tokens = tuple(_PIECES)

  def encode(self, text: str) -> list[int]:
    return [_IDS.get(piece) or ord(piece) for piece in _SPLIT.findall(text)]

  def decode(self, ids: Sequence[int]) -> str:
    return "".join(_TEXTS[i] if i in _TEXTS else chr(i) for i in ids)

  def render(
    self, content: str, system: str = "", prefill: str = "", chat: bool = True
  ) -> tuple[str, list[int]]:
    text = f"{system}{USER}{content}{ASSISTANT}{prefill}" if chat else content
    return text, self.encode(text)


CODEC = Codec()


def turn(request: types.GenerateRequest, text: str) -> types.Generation:
  """Generates `text` like an engine: up to a stop, the end, or the limit."""
  ids: list[int] = []
  decoded = ""
  finish = types.Finish.LENGTH
  for token in [*CODEC.encode(text), END_ID][: request.max_tokens]:
    ids.append(token)
    decoded += CODEC.decode([token])
    cuts = [
      decoded.index(stop) + len(stop)
      for stop in request.stop
      if stop in decoded
    ]
    if cuts:
      decoded, finish = decoded[: min(cuts)], types.Finish.STOP
      break
    if token == END_ID:
      finish = types.Finish.END_OF_TURN
      break
  # Binary fractions, so that float32 keeps them exactly.
  logps = tuple(-(request.turn + 1) - place / 8192 for place in range(len(ids)))
  return types.Generation(
    tuple(ids), logps, decoded, finish, (request.turn + 7,) * len(ids)
  )


class Engine:
  """Generates what `script` says; may fail and may be slow.

  Attributes:
    requests, released: its requests and released addresses, in order.
    most: the most turns that ran at a time.
  """

  def __init__(
    self,
    script: Callable[[types.GenerateRequest], str] | Sequence[str],
    *,
    seconds: Callable[[], float] | None = None,
  ):
    self._script = (
      script if callable(script) else lambda request: script[request.turn]
    )
    self._seconds = seconds
    self.requests: list[types.GenerateRequest] = []
    self.released: list[types.Address] = []
    self.running = self.most = 0

  async def generate(self, request: types.GenerateRequest) -> types.Generation:
    self.requests.append(request)
    self.running += 1
    self.most = max(self.most, self.running)
    try:
      if self._seconds is not None:
        await asyncio.sleep(self._seconds())
      return turn(request, self._script(request))
    finally:
      self.running -= 1

  def release(self, address: types.Address) -> None:
    self.released.append(address)


class Retriever:
  """Returns the first `k` passages that `hits` has for a query."""

  def __init__(
    self,
    hits: Mapping[str, Sequence[types.Passage]] | None = None,
    *,
    error: Exception | None = None,
    seconds: float = 0.0,
  ):
    self._hits = hits or {}
    self._error = error
    self._seconds = seconds
    self.requests: list[types.SearchRequest] = []

  async def search(
    self, request: types.SearchRequest
  ) -> Sequence[types.Passage]:
    self.requests.append(request)
    await asyncio.sleep(self._seconds)
    if self._error is not None:
      raise self._error
    return self._hits.get(request.query, ())[: request.k]


QUESTION = types.Question("q", "Q?", ("x",))


def play(
  engine: Any,
  retriever: Any,
  config: config_lib.EpisodeConfig,
  *,
  budget: Any,
  question: types.Question = QUESTION,
  place: int = 0,
  **changes: Any,
) -> types.Trajectory:
  """Plays one episode to its end; `changes` are those of `run_episode`."""
  codec = changes.pop("codec", CODEC)
  environment = changes.pop("environment", None)
  environment = environment or systems.of_episode(config)
  parts = driver.EpisodeParts(engine, retriever, config, codec, environment)
  address = types.Address(0, place, 0)
  values = {"budget": budget, "scaffold": False, "address": address} | changes
  return loop.run(driver.run_episode(question, parts, **values))


def shuffled_seconds(seed: int) -> Callable[[], float]:
  """Returns short random delays, so that episodes finish in another order."""
  draw = random.Random(seed)
  return lambda: draw.random() * 0.01


def search(query: str) -> str:
  return f"<think>look</think><search>{query}</search>"


def answer(text: str) -> str:
  return f"<think>known</think><answer>{text}</answer>"


def as_value(trajectory: types.Trajectory) -> tuple:
  """Returns the whole trajectory as a value that compares with `==`."""
  return tuple(
    value.tolist() if hasattr(value, "tolist") else value
    for value in vars(trajectory).values()
  )


def check_alignment(trajectory: types.Trajectory) -> None:
  """Asserts that every token position agrees with its span."""
  ids = trajectory.token_ids.tolist()
  authors = trajectory.authors.tolist()
  assert (
    len(ids)
    == len(authors)
    == len(trajectory.logps)
    == len(trajectory.versions)
  )
  start = authors.count(types.Author.PROMPT)
  assert authors[:start] == [types.Author.PROMPT] * start
  for span in trajectory.spans:
    end = start
    text = ""
    while end < len(ids) and len(text) < len(span.text):
      text += CODEC.decode([ids[end]])
      end += 1
    if span.author is types.Author.MODEL:
      # The completing token may extend beyond its tag, here by white space.
      assert text.startswith(span.text) and not text[len(span.text) :].strip()
      if end < len(ids) and ids[end] == END_ID:
        end += 1
    else:
      assert text == span.text
    assert authors[start:end] == [span.author] * (end - start)
    start = end
  assert start == len(ids)
  of_model = trajectory.authors == types.Author.MODEL
  assert (trajectory.logps[of_model] < 0).all()
  assert (trajectory.logps[~of_model] == 0).all()
  assert (trajectory.versions[of_model] >= 0).all()
  assert (trajectory.versions[~of_model] == -1).all()
  assert all(
    not (span.author is types.Author.ENVIRONMENT and stop in span.text)
    for span in trajectory.spans
    for stop in protocol.STOPS
  )
