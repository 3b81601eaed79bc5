"""Text encoders (BERT, E5, BGE, MiniLM) in JAX."""
