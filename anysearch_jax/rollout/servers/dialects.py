"""The dialects of servers, by `engine.kind`."""

from __future__ import annotations

from anysearch_jax.rollout.servers import server, sglang, vllm

BY_KIND: dict[str, type[server.Server]] = {
  "sglang": sglang.SglangServer,
  "vllm": vllm.VllmServer,
}
