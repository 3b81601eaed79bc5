"""The texts of an episode: tags, prompts, scoring and records."""
