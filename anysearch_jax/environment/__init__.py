"""What an episode is made of: tags, prompts, judging, and records of it."""
