"""The in-process engine: continuous batching over a paged KV cache."""
