"""Retrievers that ask a language model to make up or to refine passages."""
