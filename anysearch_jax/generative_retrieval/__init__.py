"""Retrievers that let a language model generate or refine passages."""
