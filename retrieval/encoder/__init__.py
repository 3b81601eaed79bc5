"""Text encoders (E5, BGE, MiniLM, Qwen3-Embedding) and rerankers in JAX."""
