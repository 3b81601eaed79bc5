"""Rewards, the budget curriculum and objectives: arrays in, arrays out."""
