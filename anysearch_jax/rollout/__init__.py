"""Samples episodes; WORKSPACE.md lists the modules."""
