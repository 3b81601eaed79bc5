"""Text encoders (E5, BGE, ModernBERT, Qwen3-Embedding) and rerankers in JAX."""
