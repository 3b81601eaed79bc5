"""The generated knowledge world, its expert and the warm start."""
