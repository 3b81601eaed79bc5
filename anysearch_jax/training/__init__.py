"""Rollouts, rewards, steps, checkpoints; WORKSPACE.md lists the modules."""
