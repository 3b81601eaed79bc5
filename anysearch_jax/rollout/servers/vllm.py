"""The dialect of vLLM servers: their routes, requests and replies.

It follows vLLM 0.32.0 (https://github.com/vllm-project/vllm); paths below are
in its vllm/. `launch/serve_vllm.sh` starts a server with all that a run needs.

All sampling parameters are sent, so that no default of the server applies. A
server ignores fields that it does not know, and cuts `max_tokens` to its
context; the engine asks for no more than `context` allows, and a reply that
ends early for no known reason is refused.

A server loads a folder and takes a name in two requests. In between, its
weights have a hidden name: if the load breaks off, no reply counts as one of
the old weights or of the new ones. A server ends itself over a folder that it
cannot read, and over most other errors of its engine (500), so those answers
count as an outage. The folder is checked first, where this host sees it.

While a server loads, it answers nothing but /health.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import math
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from anysearch_jax import types
from anysearch_jax.policy import architecture as architecture_lib
from anysearch_jax.policy import tensor_files
from anysearch_jax.rollout.servers import replies, server
from anysearch_jax.rollout.servers import weights as weights_lib

_GENERATE = "/inference/v1/generate"
_LOAD_ADAPTER = "/v1/load_lora_adapter"
_START = "start it by launch/serve_vllm.sh, or with the flags in that file."
# Ranks that a server may be started for (config/lora.py).
_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
# Adapters in a batch: the newest, and older ones of turns that still run.
_BATCH_ADAPTERS = "3"
# A server sends this for a log-probability that is NaN or minus infinity
# (entrypoints/scale_out/token_in_token_out/serving.py, `_clamp_logprob`).
_NOT_FINITE_LOGP = -9999.0


def adapter_flags(rank: int, targets: Sequence[str]) -> list[str]:
  """Returns the flags of a server that can load adapters.

  Args:
    rank: the adapters' rank.
    targets: the adapted matrices, as in `lora.targets`.
  """
  return [
    "--enable-lora",
    "--max-lora-rank",
    str(next((size for size in _RANKS if size >= rank), rank)),
    "--max-loras",
    _BATCH_ADAPTERS,
    "--lora-target-modules",
    *server.adapter_modules(targets),
  ]


def read_turn(
  reply: Mapping[str, Any],
  turn: server.Turn,
  versions: Mapping[str, int],
) -> server.Reply:
  """Validates a reply to a turn, and returns the parts that are needed.

  Args:
    reply: the JSON object.
    turn: the turn that was asked for.
    versions: policy versions of the weights that may have sampled, by name,
      oldest first.

  Raises:
    server.OtherWeightsError: other weights sampled.
    server.NotFiniteError: a log-probability is NaN or infinite.
    types.EngineError: the reply is invalid.
  """
  choice = _choice(reply, turn.sampled)
  reason = replies.typed_field(choice, "finish_reason", str)
  if reason == "abort":
    raise types.EngineError("The request was aborted.")
  logprobs = replies.typed_field(choice, "logprobs", dict)
  entries = replies.typed_field(logprobs, "content", list)
  ids = replies.typed_field(choice, "token_ids", list)
  usage = replies.typed_field(reply, "usage", dict)
  received = replies.typed_field(usage, "prompt_tokens", int)
  sent = len(turn.request.token_ids)
  replies.expect(
    received == sent, f"a prompt of {received} tokens", f"the {sent} sent"
  )
  pairs = [
    (_logp(entry), replies.typed_field(entry, "token_id", int))
    for entry in entries
  ]
  replies.expect(
    ids == [token for _, token in pairs],
    "token_ids that differ from the ids of the log-probabilities",
    "the same",
  )
  details = usage.get("prompt_tokens_details")
  cached = details.get("cached_tokens") if isinstance(details, dict) else None
  read = replies.turn(
    pairs,
    replies.spans(choice),
    max_tokens=turn.request.max_tokens,
    vocab_size=turn.architecture.vocab_size,
    versions=versions,
    cached=cached if type(cached) is int else 0,
    reason=f"{reason} {choice.get('stop_reason')!r}",
  )
  if turn.known_experts is None:
    return read
  count = sent + len(read.ids) - 1 - turn.known_experts
  expert_ids = read_experts(choice, count, turn.architecture)
  return read._replace(experts=expert_ids)


def read_experts(
  choice: Mapping[str, Any], count: int, a: architecture_lib.Architecture
) -> np.ndarray:
  """Returns the experts of the newest tokens but the last.

  A reply has them as base64 of a NumPy file.

  Args:
    choice: the only choice of a reply.
    count: number of tokens.
    a: the policy's architecture.

  Returns:
    Expert ids `[count, L, K]`.

  Raises:
    types.EngineError: there are none, or for another number of tokens.
  """
  text: Any = choice.get("routed_experts")
  replies.expect(
    isinstance(text, str),
    "no routed_experts",
    "them: start the server with --enable-return-routed-experts",
  )
  ids = np.empty(0)
  with contextlib.suppress(ValueError):
    file = io.BytesIO(base64.b64decode(text, validate=True))
    np.lib.format.read_magic(file)
    shape, _, dtype = np.lib.format.read_array_header_1_0(file)
    # `np.load` would allocate whatever size the header claims.
    if dtype.kind in "iu":
      ids = np.frombuffer(file.read(), dtype).reshape(shape)
  return replies.check_experts(ids, count, a)


def read_scores(
  reply: Mapping[str, Any],
  token_ids: Sequence[int],
  sampled: weights_lib.Sampled,
) -> list[float]:
  """Returns the log-probabilities of all tokens of a prompt but the first.

  Args:
    reply: the JSON object.
    token_ids: the prompt that was sent.
    sampled: the weights that must have scored it.

  Raises:
    types.EngineError: the reply is invalid, or for other tokens, or from other
      weights.
  """
  choice = _choice(reply, sampled)
  replies.check_scored(replies.spans(choice), sampled.weights)
  entries = replies.typed_field(reply, "prompt_logprobs", list)
  replies.expect(
    len(entries) == len(token_ids),
    f"scores of {len(entries)} tokens",
    f"those of the {len(token_ids)} sent",
  )
  scores = []
  for token, entry in zip(token_ids[1:], entries[1:], strict=True):
    score = replies.typed_field(entry, str(token), dict)
    scores.append(replies.finite_logp(_logp(score), token))
  return scores


def _choice(
  reply: Mapping[str, Any], sampled: weights_lib.Sampled
) -> dict[str, Any]:
  """Returns the only choice of a reply, which must name the right adapter."""
  if sampled.adapter:
    model = replies.typed_field(reply, "model", str)
    replies.expect(
      model == sampled.adapter.name,
      f"model {model!r}",
      f"the adapter {sampled.adapter.name!r}",
    )
  choices = replies.typed_field(reply, "choices", list)
  replies.expect(len(choices) == 1, f"{len(choices)} choices", "one")
  choice: dict[str, Any] = choices[0]
  return choice


def _logp(entry: Any) -> Any:
  """Returns the log-probability in an object, infinite if it stands for that.

  `replies.finite_logp` refuses other types.
  """
  logp = entry.get("logprob") if isinstance(entry, dict) else None
  is_replaced = isinstance(logp, int | float) and logp <= _NOT_FINITE_LOGP
  return -math.inf if is_replaced else logp


def _body(
  token_ids: Sequence[int],
  sampled: weights_lib.Sampled,
  **sampling_params: Any,
) -> server.Json:
  """Returns the body of a request to generate; every one is made here."""
  body: server.Json = {
    "token_ids": list(token_ids),
    "sampling_params": {"logprobs": 0, **sampling_params},
    # Separates cached prefixes by the weights.
    "cache_salt": sampled.weights,
  }
  if sampled.adapter:
    body["model"] = sampled.adapter.name
  return body


def _turn_body(turn: server.Turn) -> server.Json:
  """Returns the body of a request that samples a turn."""
  request = turn.request
  sampling = turn.sampling
  records = {}
  if turn.known_experts is not None:
    records["routed_experts_prompt_start"] = turn.known_experts
  return _body(
    request.token_ids,
    turn.sampled,
    temperature=sampling.temperature,
    top_p=sampling.top_p,
    top_k=sampling.top_k,
    min_p=0.0,
    seed=turn.seed,
    repetition_penalty=request.repetition_penalty,
    frequency_penalty=0.0,
    presence_penalty=0.0,
    ignore_eos=False,
    skip_special_tokens=False,
    max_tokens=request.max_tokens,
    stop=list(request.stop),
    stop_token_ids=sorted(turn.end_of_turn_ids),
    **records,
  )


def folder_refusal(folder: pathlib.Path, *, on_cpu: bool) -> str:
  """Returns why a server cannot load a folder of weights, or "".

  Args:
    folder: the Hugging Face folder.
    on_cpu: whether the server computes on a CPU.
  """
  if not (folder / "config.json").is_file():
    return f"not asked: {folder} has no config.json"
  try:
    names = tensor_files.headers(folder)
  except (OSError, ValueError) as error:
    return f"not asked: {error}"
  if on_cpu and "lm_head.weight" not in names:
    # The head has a packed copy of its own, which a load leaves as it was
    # (model_executor/layers/utils.py, `dispatch_cpu_unquantized_gemm`).
    return (
      "not asked: on a CPU, vLLM keeps the old output head of a policy whose "
      "head is its embedding"
    )
  return ""


class VllmServer(server.Server):
  """A vLLM server; see `server.Server`."""

  kind = "vLLM"
  context_flag = "--max-model-len"
  # Its engine has died.
  busy_statuses = server.Server.busy_statuses | {500}

  async def healthy(self) -> None:
    await self.ask("GET", "/health")

  async def alive(self) -> None:
    await self.healthy()

  async def version(self, seconds: float = math.inf) -> str:
    info = await self._told("/weight_info", seconds)
    name = info.get("weight_version")
    if not isinstance(name, str):
      raise self.error(
        f"found weight_version {name!r} in its weight_info, expected a name; "
        "launch/requirements-vllm.txt has a version that tells it."
      )
    return name

  async def _told(self, path: str, seconds: float = math.inf) -> server.Json:
    """Returns what a server with all its routes tells at a path."""
    try:
      return await self.get(path, seconds)
    except server.UnansweredError:
      raise
    except types.EngineError as error:
      raise types.EngineError(
        f"{error} Is it a vLLM server? If so, {_START}"
      ) from None

  async def describe(self) -> server.Json:
    routes = (await self._told("/openapi.json")).get("paths")
    if not isinstance(routes, dict) or _GENERATE not in routes:
      raise self.error(f"it has no {_GENERATE} (--enable-scale-out); {_START}")
    info = await self._told("/server_info?config_format=json")
    config = info.get("vllm_config")
    if not isinstance(config, dict):
      raise self.error("it does not tell its vllm_config in its server_info.")
    return {**config, "routes": [*routes]}

  def _setting(self, group: str, name: str) -> Any:
    """Returns a setting of the server by `info`; None if it does not tell."""
    settings = self.info.get(group)
    return settings.get(name) if isinstance(settings, dict) else None

  def context(self) -> int:
    if self._lends and not self._setting("model_config", "enable_sleep_mode"):
      raise self.error(
        "it keeps its memory, expected a server that releases it while "
        "training (servers.colocated): start it with --enable-sleep-mode."
      )
    mode = self._setting("model_config", "logprobs_mode")
    if mode != "processed_logprobs":
      raise self.error(
        f"found logprobs_mode {mode!r}, expected log-probabilities of what was "
        "sampled from: start it with --logprobs-mode=processed_logprobs."
      )
    for name in ("data_parallel_size", "_api_process_count"):
      if (count := self._setting("parallel_config", name)) != 1:
        raise self.error(
          f"found {name} {count!r}, expected 1: adapters reach one process; "
          "start several servers and name all of them in servers.urls."
        )
    longest = self._setting("model_config", "max_model_len")
    if type(longest) is not int:
      raise self.error(
        f"found max_model_len {longest!r} in its server_info, expected the "
        "longest context; expected a server of launch/requirements-vllm.txt."
      )
    return longest

  def check_records(self) -> None:
    if not self._setting("aux_output_config", "enable_return_routed_experts"):
      raise self.error(
        "it does not return the experts of tokens, as objective.router needs: "
        "start it with --enable-return-routed-experts."
      )

  def adapter_refusal(self, rank: int, targets: Sequence[str]) -> str:
    if self.info.get("lora_config") is None:
      return "it was started without --enable-lora"
    if _LOAD_ADAPTER not in self.info["routes"]:
      return "it was started without VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"
    return server.adapter_mismatch(
      rank,
      targets,
      largest=self._setting("lora_config", "max_lora_rank"),
      modules=self._setting("lora_config", "target_modules") or None,
    )

  async def pause(self, *, aborts: bool) -> None:
    mode = "abort" if aborts else "keep"
    await self.post(f"/pause?mode={mode}", {})

  async def resume(self) -> None:
    await self.post("/resume", {})

  async def update(self, weights: weights_lib.Weights) -> str:
    refusal = await asyncio.to_thread(
      folder_refusal,
      weights.path,
      on_cpu=self._setting("device_config", "device") == "cpu",
    )
    if refusal:
      return refusal
    await self.rename(weights_lib.hidden_name(weights_lib.run_of(weights.name)))
    body = {
      "method": "reload_weights",
      "kwargs": {"weights_path": str(weights.path)},
    }
    try:
      await self.ask(
        "POST",
        "/collective_rpc",
        body,
        deadline=weights.deadline,
        repeat=False,
      )
    except server.UnansweredError as error:
      raise server.UnansweredError(
        f"{error} Does the server's host see {weights.path}? A server ends "
        "itself over a folder that it cannot load."
      ) from None
    await self.rename(weights.name)
    return ""

  async def rename(self, name: str) -> None:
    await self.post("/update_weight_version", {"new_version": name})

  async def flush_cache(self, seconds: float = 0.0) -> None:
    answer = await self.post("/reset_prefix_cache", {})
    if answer.get("success") is not True:
      raise self.error("it did not empty its cache: requests still run.")

  async def release_memory(self) -> None:
    # Level 2 discards the weights, which the next load brings anew.
    await self.ask("POST", "/sleep?level=2", {}, repeat=False)

  async def restore_memory(self, *, weights: bool, cache: bool) -> None:
    tags = ["weights"] * weights + ["kv_cache"] * cache
    query = "&".join(f"tags={tag}" for tag in tags)
    await self.ask("POST", f"/wake_up?{query}", {}, repeat=False)

  async def load_adapter(
    self, adapter: weights_lib.Adapter, seconds: float
  ) -> None:
    body = {"lora_name": adapter.name, "lora_path": str(adapter.path)}
    await self.ask("POST", _LOAD_ADAPTER, body, deadline=seconds)

  async def unload_adapter(self, name: str) -> None:
    await self.ask("POST", "/v1/unload_lora_adapter", {"lora_name": name})

  async def sample(
    self, turn: server.Turn, versions: Callable[[], Mapping[str, int]]
  ) -> server.Reply:
    answer = await self._generate(_turn_body(turn))
    try:
      return read_turn(answer, turn, versions())
    except types.EngineError as error:
      raise self.error(error) from None

  async def score_once(
    self, token_ids: Sequence[int], sampled: weights_lib.Sampled
  ) -> list[float]:
    # A server samples at least one token.
    body = _body(token_ids, sampled, prompt_logprobs=0, max_tokens=1)
    answer = await self._generate(body)
    try:
      return read_scores(answer, token_ids, sampled)
    except types.EngineError as error:
      raise self.error(error) from None

  async def _generate(self, body: server.Json) -> server.Json:
    # No deadline here: the caller cancels. The server aborts the request when
    # its connection is closed.
    return await self.post(_GENERATE, body, deadline=math.inf)
