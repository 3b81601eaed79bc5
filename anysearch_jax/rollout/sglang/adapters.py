"""Low-rank adapters on SGLang servers, over a base that is loaded once.

A server samples its base, without a word, for a request that names no adapter,
and leaves out projections that it cannot fuse. `Sampled` therefore names the
adapter in every request, and `refusal` says which adapters stay merged into
whole weights. Of SGLang 0.5.23: srt/lora/lora.py (`_normalize_weights`) and
srt/managers/tokenizer_manager.py (`_resolve_lora_path`).
"""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import safetensors

from anysearch_jax import types

FILE = "adapter_model.safetensors"


class BaseServedError(types.EngineError):
  """A server samples its base where it was asked for an adapter."""


class Adapter(NamedTuple):
  """A PEFT folder that servers load over their base, under a name."""

  name: str
  path: pathlib.Path

  def changes(self) -> bool:
    """Returns whether it changes the base: a new one has a B of 0."""
    with safetensors.safe_open(self.path / FILE, framework="numpy") as file:
      return any(
        bool(np.any(file.get_tensor(name)))
        for name in file.keys()
        if "lora_B" in name
      )


class Sampled(NamedTuple):
  """What samples a turn: weights by name, and the adapter over them, if any.

  weights: the name that replies state. version: of the policy.
  """

  weights: str
  version: int
  adapter: Adapter | None = None

  def body(self, token_ids: Sequence[int], **fields: Any) -> dict[str, Any]:
    """Returns the body of a request to /generate; every one is made here."""
    named = {"lora_path": self.adapter.name} if self.adapter else {}
    return {
      "input_ids": list(token_ids),
      "return_logprob": True,
      **named,
      **fields,
    }

  def refused(self, error: Exception) -> bool:
    """Returns whether a server refused a request because it lacks the adapter.

    It then names the adapter, as it does for no other mistake.
    """
    return self.adapter is not None and self.adapter.name in str(error)


def modules(targets: Sequence[str]) -> list[str]:
  """Returns SGLang's names of `lora.targets`."""
  return [f"{target}_proj" for target in targets]


def held(async_level: int) -> int:
  """Returns how many adapters servers hold, besides those with running turns.

  One for each version that the staleness bound allows; at least two, for turns
  that begin during a hand-over.
  """
  return max(async_level, 1) + 1


def flags(rank: int, targets: Sequence[str], *, async_level: int) -> list[str]:
  """Returns the flags of a server that loads these adapters."""
  slots = held(async_level) + 1  # One is for requests to the base: /health.
  return [
    *("--enable-lora", "--max-lora-rank", str(rank)),
    *("--max-loras-per-batch", str(slots)),
    *("--lora-target-modules", *modules(targets)),
  ]


def refusal(info: Mapping[str, Any], rank: int, targets: Sequence[str]) -> str:
  """Returns why a server cannot load such adapters, or "".

  `info` is its server_info.
  """
  found = {*targets}
  # Without q, SGLang ignores k and v, and without gate it ignores up.
  if found & {"q", "k", "v"} and not found >= {"q", "v"}:
    return "SGLang needs lora.targets with both q and v, or neither q, k nor v"
  if "up" in found and "gate" not in found:
    return "SGLang needs lora.targets with gate where they have up"
  if info.get("enable_lora") is not True:
    return "it was started without --enable-lora"
  if info.get("dp_size", 1) != 1:
    return "it has data-parallel replicas (--dp-size)"
  largest = info.get("max_lora_rank")
  if type(largest) is not int or largest < rank:
    return f"its --max-lora-rank is {largest}, the run's rank {rank}"
  known = info.get("lora_target_modules") or []
  missing = {*modules(targets)} - {*known}
  if missing and "all" not in known:
    return f"its --lora-target-modules lack {', '.join(sorted(missing))}"
  return ""
