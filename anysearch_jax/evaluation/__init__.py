"""Plays policies under budgets and measures them, with intervals."""
