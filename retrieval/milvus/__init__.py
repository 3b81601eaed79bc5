"""Milvus as a retriever: passages in a collection of a server or of a file."""
