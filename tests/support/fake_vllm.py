"""A fake vLLM server in this process, with the interface of a real one.

It is `fake_sglang` behind the routes of version 0.32.0. It dies where a real
one does: over a folder of weights that it cannot read. It cuts a request to its
context without a word.
"""

from __future__ import annotations

import base64
import io
import pathlib
import urllib.parse
from typing import Any

import fake_sglang
import numpy as np

GENERATE = "/inference/v1/generate"
_TAGS = ["weights", "kv_cache"]


class Server(fake_sglang.Server):
  """As `fake_sglang.Server`.

  Attributes:
    settings: groups of its vllm_config; may be changed.
    routes: what it answers, in its openapi.json.
  """

  SAMPLING = (GENERATE,)

  def __init__(self, *arguments: Any, **settings: Any):
    super().__init__(*arguments, **settings)
    self._answers = {
      "/health": lambda body: (200, ""),
      "/weight_info": self._weight_info,
      "/openapi.json": lambda body: (
        200,
        {"paths": dict.fromkeys(self.routes)},
      ),
      "/server_info": self._vllm_config,
      "/v1/models": self._v1_models,
      "/pause": self._pause_generation,
      "/resume": self._continue_generation,
      "/collective_rpc": self._collective_rpc,
      "/update_weight_version": self._update_weight_version,
      "/reset_prefix_cache": self._reset_prefix_cache,
      "/sleep": lambda body: self._release_memory_occupation({"tags": _TAGS}),
      "/wake_up": self._resume_memory_occupation,
      "/v1/load_lora_adapter": self._load_lora_adapter,
      "/v1/unload_lora_adapter": self._unload_lora_adapter,
      GENERATE: self._generate_tokens,
    }
    self.routes = [*self._answers]
    self.settings: dict[str, Any] = {
      "model_config": {
        "max_model_len": fake_sglang.CONTEXT,
        "logprobs_mode": "processed_logprobs",
        "enable_sleep_mode": True,
      },
      "parallel_config": {"data_parallel_size": 1, "_api_process_count": 1},
      "aux_output_config": {"enable_return_routed_experts": True},
    }

  def answer(self, path: str, body: dict) -> tuple[int, Any]:
    route, _, query = path.partition("?")
    if route not in self.routes:
      return 404, {"detail": "Not Found"}
    asked = urllib.parse.parse_qs(query)
    single = {name: values[-1] for name, values in asked.items()}
    tags = {"tags": asked["tags"]} if "tags" in asked else {}
    return self._answers[route](body | single | tags)

  def _weight_info(self, body: dict) -> tuple[int, Any]:
    return 200, {"weight_version": self.version}

  def _vllm_config(self, body: dict) -> tuple[int, Any]:
    config = {"lora_config": self.lora or None} | self.settings
    return 200, {"vllm_config": config}

  def _collective_rpc(self, body: dict) -> tuple[int, Any]:
    assert body["method"] == "reload_weights"
    folder = pathlib.Path(body["kwargs"]["weights_path"])
    self.needs((folder / "model.safetensors").is_file(), "loaded no folder")
    named = {"model_path": folder, "weight_version": self.version}
    self._update_weights_from_disk(named | {"flush_cache": False})
    return 200, {"results": [None]}

  def _reset_prefix_cache(self, body: dict) -> tuple[int, Any]:
    status, _ = self._flush_cache(body)
    return 200, {"success": status == 200}

  def _generate_tokens(self, body: dict) -> tuple[int, Any]:
    context = body["token_ids"]
    params = body["sampling_params"]
    adapter = body.get("model")
    if adapter and adapter not in self.adapters:
      message = f"The model `{adapter}` does not exist."
      return 404, {"error": {"message": message, "code": 404}}
    most = min(params["max_tokens"], fake_sglang.CONTEXT - len(context))
    scores_prompt = "prompt_logprobs" in params
    start = params.get("routed_experts_prompt_start")
    status, answer = super()._generate(
      body
      | {
        "input_ids": context,
        "sampling_params": params | {"max_new_tokens": most},
        "extra_key": body["cache_salt"],
        "lora_path": adapter,
        "return_logprob": True,
        "logprob_start_len": 0 if scores_prompt else -1,
        "return_routed_experts": start is not None,
        "routed_experts_start_len": start or 0,
      }
    )
    if status != 200:
      return status, answer
    meta = answer["meta_info"]
    reason = meta["finish_reason"]
    usage = {
      "prompt_tokens": len(context),
      "prompt_tokens_details": {"cached_tokens": meta["cached_tokens"]},
    }
    choice = {
      "index": 0,
      "finish_reason": reason["type"],
      "stop_reason": reason.get("matched"),
      "token_ids": answer["output_ids"],
      "weight_versions": meta["weight_versions"],
      "logprobs": {
        "content": [
          {"token_id": token, "logprob": logp, "rank": 1, "top_logprobs": []}
          for logp, token, _ in meta["output_token_logprobs"]
        ]
      },
      "routed_experts": None,
    }
    if start is not None and "routed_experts" in meta:
      choice["routed_experts"] = _numpy_file(
        fake_sglang.routed((context + answer["output_ids"])[start:-1])
      )
    scores = [
      {str(token): {"logprob": score}} if place else None
      for place, (score, token, _) in enumerate(meta["input_token_logprobs"])
    ]
    return 200, {
      "model": adapter or "policy",
      "usage": usage,
      "choices": [choice],
      "prompt_logprobs": scores if scores_prompt else None,
    }


def _numpy_file(ids: np.ndarray) -> str:
  file = io.BytesIO()
  np.save(file, ids.astype(np.uint8))
  return base64.b64encode(file.getvalue()).decode()
