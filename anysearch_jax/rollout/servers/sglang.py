"""The dialect of SGLang servers: their routes, requests and replies.

Of SGLang 0.5.23. All sampling parameters are sent, so that the defaults of the
model's generation_config.json do not apply. Stop texts are also sent as regular
expressions: a server searches for a stop text only in as many last tokens as
its encoding has, and may miss it if the model spelled it with more. For a
regular expression it looks at as many tokens as the expression has characters.

A value of a reply that is missing, has the wrong type, is out of range or comes
from other weights than requested never enters a trajectory.

A server samples its base, without a word, for a request that names no adapter,
and leaves out projections that it cannot fuse (srt/lora/lora.py,
`_normalize_weights`; srt/managers/tokenizer_manager.py, `_resolve_lora_path`).
So every request names its adapter, and `adapter_refusal` says which adapters
stay merged into whole weights.
"""

from __future__ import annotations

import base64
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from anysearch_jax import types
from anysearch_jax.policy import architecture as architecture_lib
from anysearch_jax.policy import experts
from anysearch_jax.rollout.servers import server
from anysearch_jax.rollout.servers import weights as weights_lib

# Rounding may give a certain token a log-probability a little above 0.
_ABOVE_ZERO = 1e-3
_LEAST = -1e30
# The newest, the one before it for turns that begin during a hand-over, and one
# for requests to the base: /health.
_ADAPTERS = "3"
# What a server releases: weights, and what it gets back after them.
_WEIGHTS = ["weights"]
_CACHE = ["kv_cache", "cuda_graph"]


def adapter_modules(targets: Sequence[str]) -> list[str]:
  """Returns SGLang's names of `lora.targets`."""
  return [f"{target}_proj" for target in targets]


def adapter_flags(rank: int, targets: Sequence[str]) -> list[str]:
  """Returns the flags of a server that loads these adapters.

  Args:
    rank: of the adapters.
    targets: those of `lora.targets`.
  """
  return [
    "--enable-lora",
    "--max-lora-rank",
    str(rank),
    "--max-loras-per-batch",
    _ADAPTERS,
    "--lora-target-modules",
    *adapter_modules(targets),
  ]


def adapter_refusal(
  info: Mapping[str, Any], rank: int, targets: Sequence[str]
) -> str:
  """Returns why a server cannot load such adapters, or "".

  Args:
    info: its server_info.
    rank: of the adapters.
    targets: those of `lora.targets`.
  """
  wanted = {*targets}
  # Without q, SGLang ignores k and v, and without gate it ignores up.
  if wanted & {"q", "k", "v"} and not wanted >= {"q", "v"}:
    return "SGLang needs lora.targets with both q and v, or neither q, k nor v"
  if "up" in wanted and "gate" not in wanted:
    return "SGLang needs lora.targets with gate where they have up"
  if info.get("enable_lora") is not True:
    return "it was started without --enable-lora"
  if info.get("dp_size", 1) != 1:
    return "it has data-parallel replicas (--dp-size)"
  largest = info.get("max_lora_rank")
  if type(largest) is not int or largest < rank:
    return f"its --max-lora-rank is {largest}, the run's rank {rank}"
  modules = info.get("lora_target_modules") or []
  missing = {*adapter_modules(targets)} - {*modules}
  if missing and "all" not in modules:
    return f"its --lora-target-modules lack {', '.join(sorted(missing))}"
  return ""


def read_turn(
  reply: Mapping[str, Any],
  *,
  prompt: int,
  most: int,
  vocab_size: int,
  versions: Mapping[str, int],
) -> server.Reply:
  """Validates a reply to a turn and returns what a trajectory needs.

  The ids are read from the list of log-probabilities, so that each id certainly
  belongs to its log-probability.

  Args:
    reply: the JSON object.
    prompt: number of tokens that were sent.
    most: maximum number of tokens to sample.
    vocab_size: ids are below this number.
    versions: policy versions of the weights that may have sampled, by name,
      oldest first.

  Raises:
    server.OtherWeightsError: other weights sampled.
    server.NotFiniteError: a log-probability is NaN or infinite.
    types.EngineError: the reply is invalid.
  """
  meta = _field(reply, "meta_info", dict)
  reason = _field(meta, "finish_reason", dict)
  if reason.get("type") == "abort":
    why = reason.get("message") or "no reason given"
    raise types.EngineError(f"The request was aborted: {why}.")
  entries = _field(meta, "output_token_logprobs", list)
  count = _field(meta, "completion_tokens", int)
  seen = _field(meta, "prompt_tokens", int)
  _expect(1 <= count <= most, f"{count} sampled tokens", f"1 to {most}")
  _expect(len(entries) == count, f"{len(entries)} log-probabilities", count)
  _expect(seen == prompt, f"a prompt of {seen} tokens", f"the {prompt} sent")
  ids = [token for _, token in _pairs(entries)]
  logps = [_logp(*pair) for pair in _pairs(entries)]
  _expect(
    all(0 <= token < vocab_size for token in ids),
    f"token ids {ids}",
    f"ids below {vocab_size}",
  )
  _expect(
    reply.get("output_ids", ids) == ids,
    "output_ids that differ from the ids of the log-probabilities",
    "the same",
  )
  return server.Reply(
    tuple(ids),
    tuple(logps),
    _versions(meta, count, versions),
    _field(meta, "cached_tokens", int) if "cached_tokens" in meta else 0,
    str(reason),
  )


def read_experts(
  reply: Mapping[str, Any], count: int, a: architecture_lib.Architecture
) -> np.ndarray:
  """Returns the experts `[count, L, K]` of the newest tokens but the last.

  They are base64 of int32 (SGLang's srt/state_capturer/routed_experts.py).

  Raises:
    types.EngineError: there are none, or for another number of tokens.
  """
  text = reply["meta_info"].get("routed_experts")
  like = experts.record(a)
  _expect(
    isinstance(text, str),
    "no routed_experts",
    "them: start the server with --enable-return-routed-experts",
  )
  try:
    ids = np.frombuffer(base64.b64decode(text, validate=True), "<i4")
    ids = ids.reshape(count, *like.shape)
  except ValueError:
    ids = np.full((1, *like.shape), -1)
  # Where a server has stored none, all of a token's are 0.
  _expect(
    bool(np.all((ids >= 0) & (ids < a.experts)))
    and (a.active < 2 or bool(np.all(ids[..., 0] != ids[..., 1]))),
    f"{len(text)} characters of routed_experts",
    f"ids of {count} tokens x {like.shape}, below {a.experts}",
  )
  return ids.astype(like.dtype)


def read_scores(
  reply: Mapping[str, Any], token_ids: Sequence[int], *, name: str
) -> list[float]:
  """Returns the log-probabilities of all tokens of a prompt but the first.

  Raises:
    types.EngineError: the reply is invalid, or for other tokens, or from other
      weights than those called `name`.
  """
  meta = _field(reply, "meta_info", dict)
  names = [served for served, _, _ in _spans(meta)]
  _expect(set(names) == {name}, f"weights {names}", f"{name!r}")
  pairs = _pairs(_field(meta, "input_token_logprobs", list))
  _expect(
    [token for _, token in pairs] == list(token_ids),
    "scores of other tokens",
    f"those of the {len(token_ids)} sent",
  )
  return [_logp(*pair) for pair in pairs[1:]]


def _pairs(entries: Sequence[Any]) -> list[tuple[Any, int]]:
  """Returns (log-probability, id) of entries that may also have a text."""
  for entry in entries:
    _expect(
      isinstance(entry, list) and len(entry) >= 2 and type(entry[1]) is int,
      f"{entry!r} for a token",
      "its log-probability and its id",
    )
  return [tuple(entry[:2]) for entry in entries]


def _logp(logp: Any, token: int) -> float:
  # JSON has no NaN: a server may send null.
  if logp is None or (isinstance(logp, float) and not math.isfinite(logp)):
    raise server.NotFiniteError(
      f"The reply has log-probability {logp} of token {token}, expected a "
      "finite number."
    )
  _expect(
    type(logp) in (float, int) and _LEAST <= logp <= _ABOVE_ZERO,
    f"log-probability {logp!r} of token {token}",
    "a finite number that is not positive",
  )
  return min(float(logp), 0.0)


def _spans(meta: Mapping[str, Any]) -> list[tuple[str, int, int]]:
  """Returns (name, first token, end) for each set of weights that sampled."""
  return [
    (_field(s, "version", str), _field(s, "start", int), _field(s, "end", int))
    for s in _field(meta, "weight_versions", list)
  ]


def _versions(
  meta: Mapping[str, Any], count: int, known: Mapping[str, int]
) -> tuple[int, ...]:
  """Returns the policy version of each token."""
  order = list(known)
  spans = _spans(meta)
  versions: list[int] = []
  oldest = 0  # Weights that may have sampled what follows.
  for name, start, end in spans:
    if name not in known:
      raise server.OtherWeightsError(
        f"The reply has weights {name[:200]!r}, expected "
        f"{' or '.join(map(repr, order))}; was the server started again, or "
        "did another run hand weights to it?",
        name,
      )
    is_next = start == len(versions) <= end and name in order[oldest:]
    if not is_next:
      break
    oldest = order.index(name)
    versions += [known[name]] * (end - start)
  else:
    if len(versions) == count:
      return tuple(versions)
  raise types.EngineError(
    f"The reply has weight_versions {spans}, expected spans in order over "
    f"{count} tokens."
  )


def _field(values: Any, name: str, kind: type) -> Any:
  value = values.get(name) if isinstance(values, dict) else None
  _expect(
    type(value) is kind, f"{name} {value!r}", f"one of type {kind.__name__}"
  )
  return value


def _expect(holds: bool, found: object, expected: object) -> None:
  if not holds:
    raise types.EngineError(
      f"The reply has {str(found)[:200]}, expected {expected}."
    )


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
      "stop_token_ids": sorted(turn.ends),
    },
  )
  if turn.known_experts is not None:
    body["return_routed_experts"] = True
    body["routed_experts_start_len"] = turn.known_experts
  return body


class SglangServer(server.Server):
  """An SGLang server; see `server.Server`."""

  kind = "SGLang"

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
    # Others answer that they have released their memory, and keep it.
    if self._lends and self.info.get("enable_memory_saver") is not True:
      raise self.error(
        "it keeps its memory, expected a server that releases it while "
        "training (sglang.colocated): start it with --enable-memory-saver."
      )
    longest = self.info.get("max_req_input_len")
    if type(longest) is not int:
      raise self.error(
        f"found max_req_input_len {longest!r} in its server_info, expected the "
        "longest prompt; expected a server of launch/requirements-sglang.txt."
      )
    return longest - 1  # Prompts are shorter than this number.

  def check_records(self) -> None:
    # What comes back from host memory has lost its record.
    lost = self.info.get("enable_hierarchical_cache")
    if lost or self.info.get("enable_return_routed_experts") is not True:
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
    await self._change_memory("release", [*_WEIGHTS, *_CACHE])

  async def restore_memory(self, *, weights: bool, cache: bool) -> None:
    tags = _WEIGHTS * weights + _CACHE * cache
    await self._change_memory("resume", tags)

  async def _change_memory(self, change: str, tags: Sequence[str]) -> None:
    path = f"/{change}_memory_occupation"
    await self.ask("POST", path, {"tags": tags}, repeat=False)

  async def loaded_adapters(self) -> set[str]:
    models = (await self.get("/v1/models")).get("data")
    return {
      str(model.get("id"))
      for model in (models if isinstance(models, list) else [])
      if isinstance(model, dict) and model.get("parent")
    }

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
        most=turn.request.max_tokens,
        vocab_size=turn.architecture.vocab_size,
        versions=versions(),
      )
      if turn.known_experts is None:
        return reply
      count = prompt + len(reply.ids) - 1 - turn.known_experts
      chosen = read_experts(answer, count, turn.architecture)
      return reply._replace(experts=chosen)
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
    # It looks for a closed connection at each token, and each 4 seconds in its
    # queue (`_wait_one_response` of srt/managers/tokenizer_manager.py).
    return await self.post("/generate", body, deadline=math.inf)
