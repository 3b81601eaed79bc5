"""The engine over any server with OpenAI's text completions: text in, text out.

For models that run elsewhere (vLLM, SGLang, llama.cpp, a hosted one). An
episode is one text that grows: the prompt, a turn, what the environment adds,
the next turn. The route `/completions` continues such a text.
`chat_completions` plays models behind `/chat/completions`.

The server's tokens are unknown, so ids come from a local codec, and there are
no log-probabilities. Episodes can be evaluated and served, but not trained on.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from anysearch_jax import config as config_lib
from anysearch_jax import types
from anysearch_jax.host import http_calls, openai_endpoint
from anysearch_jax.rollout import plain_text

if TYPE_CHECKING:
  from anysearch_jax.policy import tokenizer

  Codec = plain_text.PlainText | tokenizer.Tokenizer

T = TypeVar("T")

_log = logging.getLogger(__name__)

_EXPECTED = "a text at choices[0].text and finish_reason 'stop' or 'length'"
# Names that servers give the field with the stop text that ended a turn: vLLM's
# and SGLang's. It is null or a token's id if the model ended the turn itself.
_MATCHED = ("stop_reason", "matched_stop")
# Fields that some servers refuse, and how their errors say so. OpenAI's newer
# models take `max_completion_tokens` only.
_OPTIONAL = (
  "max_tokens",
  "max_completion_tokens",
  "seed",
  "stop",
  "temperature",
  "top_p",
  "top_k",
  "tool_choice",
  "parallel_tool_calls",
  "stream_options",
  "stream",
)
_REFUSAL = re.compile(
  r"(un|not |n't |only )(support|recogni[sz]ed|known|expected|permit|allow)"
  r"|verified|extra|forbidden|invalid (field|param)",
  re.IGNORECASE,
)


class CompletionsEngine:
  """`types.Engine` over a server; it can be used from any event loop.

  Log-probabilities are recorded as 0 and versions as 0.

  Args:
    url: address of the server's interface (`http://host:8000/v1`).
    codec: counts tokens and renders prompts.
    model: the model's name at the server.
    key_variable: environment variable with the key; "": no key.
    sampling: how tokens are drawn, unless a request says otherwise.
    deadline: seconds of one turn, with its retries.
    concurrency: limit on concurrent turns.

  Attributes:
    counters: `requests`, and `prompt_tokens` and `sampled_tokens` as the server
      counts them.
    refused: the fields that the server refuses; others join them when it says
      so, and are left out from then on.

  Raises:
    ValueError: the url is invalid, or the model's name or the key is missing.
  """

  route = "/completions"

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
  ):
    if not model:
      raise ValueError(
        "Found no name of a model; expected the one that the server gives it "
        "(its /v1/models lists them)."
      )
    self._codec = codec
    self._model = model
    self._sampling = sampling
    self._endpoint = openai_endpoint.OpenAIEndpoint(
      url,
      self.route,
      key_variable=key_variable,
      deadline=deadline,
      concurrency=concurrency,
    )
    self.counters: Counter[str] = Counter()
    self.refused: set[str] = set()

  async def probe(self) -> str:
    """Samples one token, which shows that address, key and model are right.

    Returns:
      How the model is asked: `completions`.

    Raises:
      types.EngineError: they are not.
    """
    with engine_errors():
      fields = {"prompt": "?", "max_tokens": 1}
      await self._ask(fields, self._sampling, _read_completion, _EXPECTED)
    return "completions"

  async def generate(self, request: types.GenerateRequest) -> types.Generation:
    """See `types.Engine`."""
    fields = {
      "prompt": self._codec.transcript(request.token_ids),
      "max_tokens": request.max_tokens,
      "stop": list(request.stop),
      # Turns are reproducible if the server honours the seed.
      "seed": seed(request.address, request.turn),
      # Streams, so that the deadline is one between tokens.
      "stream": True,
      "stream_options": {"include_usage": True},
    }
    sampling = self._sampling.for_request(request)
    with engine_errors():
      completion, _ = await self._ask(
        fields, sampling, _read_completion, _EXPECTED, ignore
      )
    return generation(completion, request, self._codec)

  def release(self, address: types.Address) -> None:
    """Does nothing: the server keeps no episodes."""

  def close(self) -> None:
    """Closes connections; running turns fail."""
    self._endpoint.close()

  async def _ask(
    self,
    fields: Mapping[str, Any],
    sampling: config_lib.SamplingConfig,
    read: Callable[[Any], T | None],
    expected: str,
    tell: Callable[[Mapping[str, Any]], None] | None = None,
  ) -> tuple[T, openai_endpoint.Usage]:
    """Asks the server, without the fields that it refuses.

    Args:
      fields: of the request's body, besides the model and the sampling.
      sampling: how tokens are drawn.
      read: returns the value of a choice, None if it has another shape.
      expected: the shape that `read` expects, for messages.
      tell: called with the message so far, if the answer is streamed.
    """
    body: dict[str, Any] = {
      "model": self._model,
      "temperature": sampling.temperature,
      "top_p": sampling.top_p,
    }
    if sampling.top_k:
      # Not a field of OpenAI's, but vLLM, SGLang and llama.cpp know it.
      body["top_k"] = sampling.top_k
    body.update(fields)
    while True:
      sent = dict(body)
      if "max_tokens" in self.refused:
        sent["max_completion_tokens"] = sent["max_tokens"]
      sent = {k: v for k, v in sent.items() if k not in self.refused}
      self.counters["requests"] += 1
      try:
        answer, usage = await self._endpoint.ask(
          sent, read, expected=expected, tell=tell
        )
      except http_calls.RefusedError as error:
        field = _refused_field(error, sent)
        if field is None:
          raise
        self._leave_out(field, str(error))
        continue
      self.counters["prompt_tokens"] += usage.prompt
      self.counters["sampled_tokens"] += usage.completion
      return answer, usage

  def _leave_out(self, field: str, why: str) -> None:
    """Leaves a field out of all later requests, and says so once."""
    if field not in self.refused:
      self.refused.add(field)
      _log.warning("%s Requests leave %s out from now on.", why, field)


def _refused_field(
  error: http_calls.RefusedError, sent: Mapping[str, Any]
) -> str | None:
  """Returns the optional field that an error refuses, None if it names none.

  Servers have no common form for it, so the error's words are searched.
  """
  if error.status not in (400, 422) or not _REFUSAL.search(str(error)):
    return None
  words = re.findall(r"\w+", str(error))
  return next(
    (word for word in words if word in _OPTIONAL and word in sent), None
  )


@contextlib.contextmanager
def engine_errors() -> Iterator[None]:
  """Raises errors of the server as those of an engine."""
  try:
    yield
  except types.RetrievalError as error:
    raise types.EngineError(str(error)) from None


def ignore(message: Mapping[str, Any]) -> None:
  """Does not pass on a message that a server streams."""


class Completion(NamedTuple):
  """A server's answer.

  Attributes:
    text: the text, usually without its stop text.
    finish: `stop` or `length`.
    matched: the stop text that ended it; "" if the server says that none did,
      None if it does not say.
  """

  text: str
  finish: str
  matched: str | None


def _read_completion(choice: Any) -> Completion | None:
  """Reads a choice; None if it has another shape."""
  text = http_calls.text_of(choice["text"])
  finish = choice["finish_reason"]
  if text is None or finish not in ("stop", "length"):
    return None
  return Completion(text, finish, matched(choice))


def matched(choice: Mapping[str, Any]) -> str | None:
  """Returns the stop text that a choice names, see `Completion`."""
  values = [choice[name] for name in _MATCHED if name in choice]
  if not values:
    return None
  return next((value for value in values if isinstance(value, str)), "")


def generation(
  completion: Completion, request: types.GenerateRequest, codec: Codec
) -> types.Generation:
  """Returns a turn, with the stop text that the server removed.

  Args:
    completion: the server's answer.
    request: the turn that it answers.
    codec: gives the ids of the text.

  Raises:
    types.EngineError: the turn is empty.
  """
  text, finish = _restore_stop_text(completion, request)
  ids = codec.encode(text)
  if len(ids) > request.max_tokens:
    # The server counts fewer tokens. The local count limits an episode.
    ids = ids[: request.max_tokens]
    text = codec.decode(ids)
    finish = types.Finish.LENGTH
  end = codec.end_of_turn_id
  if finish is types.Finish.END_OF_TURN and end is not None:
    ids = [*ids, end][: request.max_tokens]
  if not ids:
    raise types.EngineError(
      f"Found an empty text for turn {request.turn}, expected one token or "
      "more."
    )
  return types.Generation(
    token_ids=tuple(ids),
    logps=(0.0,) * len(ids),
    text=text,
    finish=finish,
    versions=(0,) * len(ids),
  )


def _restore_stop_text(
  completion: Completion, request: types.GenerateRequest
) -> tuple[str, types.Finish]:
  """Returns a turn's whole text and why it ended.

  Most servers remove the stop text, and not all say which one it was.
  """
  text = completion.text
  matched = completion.matched
  if (cut := request.cut(text)) is not None:
    return cut, types.Finish.STOP
  if completion.finish == "length":
    return text, types.Finish.LENGTH
  if matched is None:
    # Guess it: a turn holds no stop text, so the tag that it opened last is
    # still open. </x> closes <x>, and <|end_x|> closes <|begin_x|>.
    stop_by_opening = {
      stop.replace("</", "<", 1).replace("<|end_", "<|begin_", 1): stop
      for stop in request.stop
    }
    opening = max(stop_by_opening, key=text.rfind, default="")
    is_open = bool(opening) and opening in text
    matched = stop_by_opening[opening] if is_open else ""
  if matched in request.stop:
    return text + matched, types.Finish.STOP
  return text, types.Finish.END_OF_TURN


def seed(address: types.Address, turn: int) -> int:
  """Returns a seed of 31 bits; `variant` is ignored, as in other draws."""
  key = json.dumps([*map(int, address._replace(variant=0)), turn])
  digest = hashlib.blake2b(key.encode(), digest_size=4).digest()
  return int.from_bytes(digest) >> 1
