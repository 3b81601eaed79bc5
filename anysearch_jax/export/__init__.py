"""A checkpoint as a Hugging Face folder with its model card."""
