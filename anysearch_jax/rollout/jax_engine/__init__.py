"""The in-process engine: continuous batching over pages of KV cache."""
