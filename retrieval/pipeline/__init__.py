"""A retriever in stages: retrieve, fuse, rerank, cut."""
