"""Plays policies under budgets and measures what they did, with intervals."""
