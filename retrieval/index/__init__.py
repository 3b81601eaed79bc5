"""Indexes over passages: built, opened, searched, fused, measured."""
