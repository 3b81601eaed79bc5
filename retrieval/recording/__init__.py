"""Answers of a retriever, recorded and played again."""
