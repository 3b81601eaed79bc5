"""The retriever as an HTTP service."""
