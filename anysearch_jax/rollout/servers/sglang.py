"""The dialect of SGLang servers: their routes, requests and replies.

It follows SGLang 0.5.23 (https://github.com/sgl-project/sglang); paths below
are in its python/sglang.

All sampling parameters are sent, so that the defaults of the model's
generation_config.json do not apply. Stop texts are also sent as regular
expressions. A server searches for a stop text only in as many last tokens as
the text's encoding has, so it may miss one that the model spelled with more
tokens. For a regular expression it looks at as many tokens as the expression
has characters.

For a request that names no adapter, a server samples its base without a
warning. It also leaves out projections that it cannot fuse (srt/lora/lora.py,
`_normalize_weights`; srt/managers/tokenizer_manager.py, `_resolve_lora_path`).
So every request names its adapter, and `adapter_refusal` decides which adapters
must be merged into whole weights.
"""

from __future__ import annotations

import base64
import contextlib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from anysearch_jax import types
from anysearch_jax.policy import architecture as architecture_lib
from anysearch_jax.policy import experts
from anysearch_jax.rollout.servers import replies, server
from anysearch_jax.rollout.servers import weights as weights_lib

# Adapters in a batch: the newest, the one before it for turns that begin during
# a hand-over, and one for requests to the base (/health).
_BATCH_ADAPTERS = "3"
# Tags of the memory that a server releases and restores.
_WEIGHTS_TAGS = ["weights"]
_CACHE_TAGS = ["kv_cache", "cuda_graph"]


def adapter_flags(rank: int, targets: Sequence[str]) -> list[str]:
  """Returns the flags of a server that can load adapters.

  Args:
    rank: the adapters' rank.
    targets: the adapted matrices, as in `lora.targets`.
  """
  return [
    "--enable-lora",
    "--max-lora-rank",
    str(rank),
    "--max-loras-per-batch",
    _BATCH_ADAPTERS,
    "--lora-target-modules",
    *server.adapter_modules(targets),
  ]


def adapter_refusal(
  info: Mapping[str, Any], rank: int, targets: Sequence[str]
) -> str:
  """Returns why a server cannot load such adapters, or "".

  Args:
    info: the server's server_info.
    rank: the adapters' rank.
    targets: the adapted matrices, as in `lora.targets`.
  """
  matrices = set(targets)
  # Without q, SGLang ignores k and v, and without gate it ignores up.
  if matrices & {"q", "k", "v"} and not matrices >= {"q", "v"}:
    return "SGLang needs lora.targets with both q and v, or neither q, k nor v"
  if "up" in matrices and "gate" not in matrices:
    return "SGLang needs lora.targets with gate where they have up"
  if info.get("enable_lora") is not True:
    return "it was started without --enable-lora"
  if info.get("dp_size", 1) != 1:
    return "it has data-parallel replicas (--dp-size)"
  modules = info.get("lora_target_modules") or []
  return server.adapter_mismatch(
    rank,
    targets,
    largest=info.get("max_lora_rank"),
    modules=None if "all" in modules else modules,
  )


def read_turn(
  reply: Mapping[str, Any],
  *,
  prompt: int,
  max_tokens: int,
  vocab_size: int,
  versions: Mapping[str, int],
) -> server.Reply:
  """Validates a reply to a turn, and returns the parts that are needed.

  The ids are read from the list of log-probabilities, so that each id certainly
  belongs to its log-probability.

  Args:
    reply: the JSON object.
    prompt: number of tokens that were sent.
    max_tokens: maximum number of tokens to sample.
    vocab_size: ids are below this number.
    versions: policy versions of the weights that may have sampled, by name,
      oldest first.

  Raises:
    server.OtherWeightsError: other weights sampled.
    server.NotFiniteError: a log-probability is NaN or infinite.
    types.EngineError: the reply is invalid.
  """
  meta = replies.typed_field(reply, "meta_info", dict)
  reason = replies.typed_field(meta, "finish_reason", dict)
  if reason.get("type") == "abort":
    why = reason.get("message") or "no reason given"
    raise types.EngineError(f"The request was aborted: {why}.")
  entries = replies.typed_field(meta, "output_token_logprobs", list)
  count = replies.typed_field(meta, "completion_tokens", int)
  received = replies.typed_field(meta, "prompt_tokens", int)
  replies.expect(
    len(entries) == count, f"{len(entries)} log-probabilities", count
  )
  replies.expect(
    received == prompt,
    f"a prompt of {received} tokens",
    f"the {prompt} sent",
  )
  cached = 0
  if "cached_tokens" in meta:
    cached = replies.typed_field(meta, "cached_tokens", int)
  turn = replies.turn(
    _pairs(entries),
    replies.spans(meta),
    max_tokens=max_tokens,
    vocab_size=vocab_size,
    versions=versions,
    cached=cached,
    reason=str(reason),
  )
  replies.expect(
    reply.get("output_ids", [*turn.ids]) == [*turn.ids],
    "output_ids that differ from the ids of the log-probabilities",
    "the same",
  )
  return turn


def read_experts(
  reply: Mapping[str, Any], count: int, a: architecture_lib.Architecture
) -> np.ndarray:
  """Returns the experts of the newest tokens but the last.

  A reply has them as base64 of int32 (srt/state_capturer/routed_experts.py).

  Args:
    reply: the JSON object.
    count: number of tokens.
    a: the policy's architecture.

  Returns:
    Expert ids `[count, L, K]`.

  Raises:
    types.EngineError: there are none, or for another number of tokens.
  """
  text = reply["meta_info"].get("routed_experts")
  replies.expect(
    isinstance(text, str),
    "no routed_experts",
    "them: start the server with --enable-return-routed-experts",
  )
  ids = np.empty(0)
  with contextlib.suppress(ValueError):
    ids = np.frombuffer(base64.b64decode(text, validate=True), "<i4")
    ids = ids.reshape(count, *experts.record(a).shape)
  return replies.check_experts(ids, count, a)


def read_scores(
  reply: Mapping[str, Any], token_ids: Sequence[int], *, name: str
) -> list[float]:
  """Returns the log-probabilities of all tokens of a prompt but the first.

  Args:
    reply: the JSON object.
    token_ids: the prompt that was sent.
    name: name of the weights that must have scored it.

  Raises:
    types.EngineError: the reply is invalid, or for other tokens, or from other
      weights than those called `name`.
  """
  meta = replies.typed_field(reply, "meta_info", dict)
  replies.check_scored(replies.spans(meta), name)
  pairs = _pairs(replies.typed_field(meta, "input_token_logprobs", list))
  replies.expect(
    [token for _, token in pairs] == list(token_ids),
    "scores of other tokens",
    f"those of the {len(token_ids)} sent",
  )
  return [replies.finite_logp(logp, token) for logp, token in pairs[1:]]


def _pairs(entries: Sequence[Any]) -> list[tuple[Any, int]]:
  """Returns (log-probability, id) of entries that may also have a text."""
  for entry in entries:
    replies.expect(
      isinstance(entry, list) and len(entry) >= 2 and type(entry[1]) is int,
      f"{entry!r} for a token",
      "its log-probability and its id",
    )
  return [tuple(entry[:2]) for entry in entries]


def _body(
  token_ids: Sequence[int], sampled: weights_lib.Sampled, **fields: Any
) -> server.Json:
  """Returns the body of a request to /generate; every one is made here."""
  body = {"input_ids": list(token_ids), "return_logprob": True, **fields}
  if sampled.adapter:
    body["lora_path"] = sampled.adapter.name
  return body


def _turn_body(turn: server.Turn) -> server.Json:
  """Returns the body of a request that samples a turn."""
  request = turn.request
  sampling = turn.sampling
  body = _body(
    request.token_ids,
    turn.sampled,
    logprob_start_len=-1,
    # Separates cached prefixes by the weights.
    extra_key=turn.sampled.weights,
    sampling_params={
      "temperature": sampling.temperature,
      "top_p": sampling.top_p,
      "top_k": sampling.top_k or -1,
      "min_p": 0.0,
      "sampling_seed": turn.seed,
      "repetition_penalty": request.repetition_penalty,
      "frequency_penalty": 0.0,
      "presence_penalty": 0.0,
      "ignore_eos": False,
      "skip_special_tokens": False,
      "no_stop_trim": True,
      "max_new_tokens": request.max_tokens,
      "stop": list(request.stop),
      "stop_regex": [re.escape(stop) for stop in request.stop],
      "stop_token_ids": sorted(turn.end_of_turn_ids),
    },
  )
  if turn.known_experts is not None:
    body["return_routed_experts"] = True
    body["routed_experts_start_len"] = turn.known_experts
  return body


class SglangServer(server.Server):
  """An SGLang server; see `server.Server`."""

  kind = "SGLang"
  context_flag = "--context-length"

  async def healthy(self) -> None:
    await self.ask("GET", "/health")

  async def version(self, seconds: float = math.inf) -> str:
    info = await self.get("/model_info", seconds)
    name = info.get("weight_version")
    if not isinstance(name, str):
      raise self.error(
        f"found weight_version {name!r} in its model_info, expected a name; "
        "launch/requirements-sglang.txt has a version that tells it."
      )
    return name

  async def describe(self) -> server.Json:
    return await self.get("/server_info")

  def context(self) -> int:
    # Without this flag, servers answer that they released their memory, and
    # keep it.
    if self._lends and self.info.get("enable_memory_saver") is not True:
      raise self.error(
        "it keeps its memory, expected a server that releases it while "
        "training (servers.colocated): start it with --enable-memory-saver."
      )
    longest = self.info.get("max_req_input_len")
    if type(longest) is not int:
      raise self.error(
        f"found max_req_input_len {longest!r} in its server_info, expected the "
        "longest prompt; expected a server of launch/requirements-sglang.txt."
      )
    return longest - 1  # Prompts are shorter than this number.

  def check_records(self) -> None:
    # Tokens whose cache comes back from host memory have lost their record.
    loses_records = self.info.get("enable_hierarchical_cache")
    returns_experts = self.info.get("enable_return_routed_experts") is True
    if loses_records or not returns_experts:
      raise self.error(
        "it does not return the experts of all tokens, as objective.router "
        "needs: start it with --enable-return-routed-experts, without "
        "--enable-hierarchical-cache."
      )

  def adapter_refusal(self, rank: int, targets: Sequence[str]) -> str:
    return adapter_refusal(self.info, rank, targets)

  async def pause(self, *, aborts: bool) -> None:
    mode = "abort" if aborts else "in_place"
    await self.post("/pause_generation", {"mode": mode})

  async def resume(self) -> None:
    await self.post("/continue_generation", {})

  async def update(self, weights: weights_lib.Weights) -> str:
    answer = await self.post(
      "/update_weights_from_disk",
      {
        "model_path": str(weights.path),
        "weight_version": weights.name,
        # With running requests, it would fail after the weights changed.
        "flush_cache": False,
      },
      deadline=weights.deadline,
    )
    is_loaded = answer.get("success") is True
    return "" if is_loaded else str(answer.get("message"))

  async def rename(self, name: str) -> None:
    body = {"new_version": name, "abort_all_requests": False}
    await self.post("/update_weight_version", body)

  async def flush_cache(self, seconds: float = 0.0) -> None:
    timeout = f"?timeout={seconds:g}" if seconds else ""
    await self.ask("POST", f"/flush_cache{timeout}")

  async def release_memory(self) -> None:
    await self._change_memory("release", [*_WEIGHTS_TAGS, *_CACHE_TAGS])

  async def restore_memory(self, *, weights: bool, cache: bool) -> None:
    tags: list[str] = []
    if weights:
      tags += _WEIGHTS_TAGS
    if cache:
      tags += _CACHE_TAGS
    await self._change_memory("resume", tags)

  async def _change_memory(self, change: str, tags: Sequence[str]) -> None:
    path = f"/{change}_memory_occupation"
    await self.ask("POST", path, {"tags": tags}, repeat=False)

  async def load_adapter(
    self, adapter: weights_lib.Adapter, seconds: float
  ) -> None:
    body = {"lora_name": adapter.name, "lora_path": str(adapter.path)}
    await self.post("/load_lora_adapter", body, deadline=seconds)

  async def unload_adapter(self, name: str) -> None:
    await self.post("/unload_lora_adapter", {"lora_name": name})

  async def sample(
    self, turn: server.Turn, versions: Callable[[], Mapping[str, int]]
  ) -> server.Reply:
    answer = await self._generate(_turn_body(turn))
    prompt = len(turn.request.token_ids)
    try:
      reply = read_turn(
        answer,
        prompt=prompt,
        max_tokens=turn.request.max_tokens,
        vocab_size=turn.architecture.vocab_size,
        versions=versions(),
      )
      if turn.known_experts is None:
        return reply
      count = prompt + len(reply.ids) - 1 - turn.known_experts
      expert_ids = read_experts(answer, count, turn.architecture)
      return reply._replace(experts=expert_ids)
    except types.EngineError as error:
      raise self.error(error) from None

  async def score_once(
    self, token_ids: Sequence[int], sampled: weights_lib.Sampled
  ) -> list[float]:
    body = _body(
      token_ids,
      sampled,
      logprob_start_len=0,
      sampling_params={"max_new_tokens": 0},
    )
    answer = await self._generate(body)
    try:
      return read_scores(answer, token_ids, name=sampled.weights)
    except types.EngineError as error:
      raise self.error(error) from None

  async def _generate(self, body: server.Json) -> server.Json:
    # No deadline here: the caller cancels. The server notices a closed
    # connection at the next token, or within 4 seconds in its queue
    # (`_wait_one_response` of srt/managers/tokenizer_manager.py).
    return await self.post("/generate", body, deadline=math.inf)
