"""The engine over any server with OpenAI's text completions: text in, text out.

For models that run elsewhere (vLLM, SGLang, llama.cpp, a hosted one). An
episode is one text that grows: the prompt, a turn, what the environment adds,
the next turn. The route `/completions` continues such a text. The route
`/chat/completions` cannot be used: after a search the model has to go on in the
middle of its own message, which OpenAI's interface has no form for.

The server's tokens are unknown, so ids are a local codec's, and there are no
log-probabilities: episodes can be evaluated and served, and not trained on.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import httpx2

from anysearch_jax import config as config_lib
from anysearch_jax import types
from anysearch_jax.host import http_calls

_ADVICE = "Does a server with OpenAI's completions run there?"
_EXPECTED = "a text at choices[0].text and finish_reason 'stop' or 'length'"
# Names that servers give the field with the stop text that ended a turn: vLLM's
# and SGLang's. It is null or a token's id if the model ended the turn itself.
_MATCHED = ("stop_reason", "matched_stop")


class Codec(types.TextCodec, Protocol):
  """What the engine asks of a codec.

  Attributes:
    end_of_turn_id: recorded for a turn that the model ended; None: nothing.
  """

  @property
  def end_of_turn_id(self) -> int | None: ...

  def transcript(self, ids: Sequence[int]) -> str:
    """Returns the text that a server encodes to `ids`."""
    ...


class CompletionsEngine:
  """`types.Engine` over a server; it can be used from any event loop.

  Log-probabilities are recorded as 0 and versions as 0.

  Args:
    url: of the server's interface (`http://host:8000/v1`).
    codec: counts tokens and renders prompts.
    model: the model's name at the server.
    key_variable: environment variable with the key; "": no key.
    sampling: how tokens are drawn, unless a request says otherwise.
    deadline: seconds of one turn, with its retries.
    concurrency: limit on concurrent turns.
    transport: replaces the network, for tests.

  Attributes:
    counters: `requests`, and `prompt_tokens` and `sampled_tokens` as the server
      counts them.

  Raises:
    ValueError: the url is invalid, or the model's name or the key is missing.
  """

  def __init__(
    self,
    url: str,
    codec: Codec,
    *,
    model: str,
    key_variable: str = "",
    sampling: config_lib.SamplingConfig,
    deadline: float,
    concurrency: int,
    transport: httpx2.AsyncBaseTransport | None = None,
  ):
    if not model:
      raise ValueError(
        "Found no name of a model; expected the one that the server gives it "
        "(its /v1/models lists them)."
      )
    self._codec, self._model, self._sampling = codec, model, sampling
    self._endpoint = http_calls.OpenAIEndpoint(
      url,
      "/completions",
      key_variable=key_variable,
      patience=http_calls.Patience(deadline=deadline, concurrency=concurrency),
      advice=_ADVICE,
      transport=transport,
    )
    self.counters: Counter[str] = Counter()

  async def probe(self) -> None:
    """Samples one token, which shows that address, key and model are right.

    Raises:
      types.EngineError: they are not.
    """
    await self._ask({"prompt": "?", "max_tokens": 1}, self._sampling)

  async def generate(self, request: types.GenerateRequest) -> types.Generation:
    """See `types.Engine`."""
    asked = {
      "prompt": self._codec.transcript(request.token_ids),
      "max_tokens": request.max_tokens,
      "stop": list(request.stop),
      # Turns are reproducible if the server honours the seed.
      "seed": _seed(request.address, request.turn),
    }
    sampling = self._sampling.asked(request)
    return _generation(await self._ask(asked, sampling), request, self._codec)

  def release(self, address: types.Address) -> None:
    """Does nothing: the server keeps no episodes."""

  def close(self) -> None:
    """Closes connections; running turns fail."""
    self._endpoint.close()

  async def _ask(
    self, asked: dict[str, Any], s: config_lib.SamplingConfig
  ) -> _Completion:
    body = {
      "model": self._model,
      "temperature": s.temperature,
      "top_p": s.top_p,
      # Not OpenAI's, but known to vLLM, SGLang and llama.cpp.
      **({"top_k": s.top_k} if s.top_k else {}),
      **asked,
    }
    self.counters["requests"] += 1
    try:
      completion, usage = await self._endpoint.ask(
        body, _completion, expected=_EXPECTED
      )
    except types.RetrievalError as error:
      raise types.EngineError(str(error)) from None
    self.counters["prompt_tokens"] += usage.prompt
    self.counters["sampled_tokens"] += usage.completion
    return completion


class _Completion(NamedTuple):
  """A server's answer.

  matched: the stop text that ended it; "" if the server says that none did, and
    None if it does not say.
  """

  text: str
  finish: str
  matched: str | None


def _completion(choice: Any) -> _Completion | None:
  """Reads a choice; None if it has another shape."""
  text, finish = http_calls.text_of(choice["text"]), choice["finish_reason"]
  if text is None or finish not in ("stop", "length"):
    return None
  said = [choice[name] for name in _MATCHED if name in choice]
  matched = next((m for m in said if isinstance(m, str)), "" if said else None)
  return _Completion(text, finish, matched)


def _generation(
  completion: _Completion, request: types.GenerateRequest, codec: Codec
) -> types.Generation:
  """Returns a turn, with the stop text that the server removed.

  Raises:
    types.EngineError: the turn is empty.
  """
  text, finish = _ended(completion, request)
  ids = codec.encode(text)
  if len(ids) > request.max_tokens:
    # The server counts fewer tokens. The local count limits an episode.
    ids = ids[: request.max_tokens]
    text, finish = codec.decode(ids), types.Finish.LENGTH
  end = codec.end_of_turn_id
  if finish is types.Finish.END_OF_TURN and end is not None:
    ids = [*ids, end][: request.max_tokens]
  if not ids:
    raise types.EngineError(
      f"Found an empty text for turn {request.turn}, expected one token or "
      "more."
    )
  zeros = (0,) * len(ids)
  return types.Generation(tuple(ids), (0.0,) * len(ids), text, finish, zeros)


def _ended(
  completion: _Completion, request: types.GenerateRequest
) -> tuple[str, types.Finish]:
  """Returns a turn's whole text and why it ended.

  Most servers remove the stop text, and not all say which one it was.
  """
  text, matched = completion.text, completion.matched
  if (cut := request.cut(text)) is not None:
    return cut, types.Finish.STOP
  if completion.finish == "length":
    return text, types.Finish.LENGTH
  if matched is None:
    # A turn holds no stop text, so the tag that it opened last is still open:
    # that of </x> is <x>, that of <|end_x|> is <|begin_x|>.
    opened = {
      stop.replace("</", "<", 1).replace("<|end_", "<|begin_", 1): stop
      for stop in request.stop
    }
    last = max(opened, key=text.rfind, default="")
    matched = opened[last] if last and last in text else ""
  if matched in request.stop:
    return text + matched, types.Finish.STOP
  return text, types.Finish.END_OF_TURN


def _seed(address: types.Address, turn: int) -> int:
  """Returns a seed of 31 bits; `variant` is ignored, as in other draws."""
  key = json.dumps([*map(int, address._replace(variant=0)), turn])
  digest = hashlib.blake2b(key.encode(), digest_size=4).digest()
  return int.from_bytes(digest) >> 1


# Ids of ASCII texts have this bit, those of other characters do not. All ids
# fit into int32.
_ASCII = 1 << 30
_MOST = 4
_PIECE = re.compile(r"[\x00-\x7f]{1,4}|[^\x00-\x7f]")
_END = 0
# Control tokens of the usual families, to be neutralised in outside texts:
# a server reads them as control tokens wherever they occur.
_CONTROL = (
  *("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|end_of_text|>"),
  *("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>"),
  *("<|eot_id|>", "<|eom_id|>", "<|python_tag|>", "<|end|>", "<|user|>"),
  *("<|assistant|>", "<|system|>", "<|start|>", "<|message|>", "<|return|>"),
  *("<start_of_turn>", "<end_of_turn>", "<bos>", "<eos>", "<s>", "</s>"),
  *("[INST]", "[/INST]", "<<SYS>>", "<</SYS>>"),
)


class PlainText:
  """A codec for models whose tokenizer is not at hand.

  It has no vocabulary and no chat template. An id stands for up to four ASCII
  characters or for one other character, which is about what tokenizers make of
  prose. Lengths in tokens are therefore estimates, but no text is changed:
  decoding gives what was encoded.
  """

  end_of_turn_ids = frozenset({_END})
  end_of_turn_id = _END
  control_tokens: tuple[str, ...] = _CONTROL

  def encode(self, text: str) -> list[int]:
    """Returns the ids of a text."""
    return [_id(piece) for piece in _PIECE.findall(text)]

  def decode(self, ids: Sequence[int]) -> str:
    """Returns the text of ids."""
    return "".join(map(_text, ids))

  def transcript(self, ids: Sequence[int]) -> str:
    """Returns what a server is sent for ids: their text."""
    return self.decode(ids)

  def render(self, content: str) -> tuple[str, list[int]]:
    """Returns the content itself as the prompt, as for a base model."""
    return content, self.encode(content)


def _id(piece: str) -> int:
  if not piece.isascii():
    return ord(piece)
  packed = 0
  for character in piece.ljust(_MOST, "\0"):
    packed = packed << 7 | ord(character)
  return _ASCII | (len(piece) - 1) << 28 | packed


def _text(token: int) -> str:
  if token == _END:
    return ""
  if not token & _ASCII:
    return chr(token)
  characters = (chr(token >> 7 * i & 127) for i in reversed(range(_MOST)))
  return "".join(characters)[: (token >> 28 & 3) + 1]
