"""Services that answer questions with an agent, for other programs."""
