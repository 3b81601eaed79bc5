"""Rewards, budgets and objectives: arrays in, arrays out."""
