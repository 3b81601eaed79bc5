"""A generated knowledge world, its tokenizer and its exact agents."""
