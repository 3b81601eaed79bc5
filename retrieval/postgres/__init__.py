"""PostgreSQL as a retriever: passages in a table."""
