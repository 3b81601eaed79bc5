"""Indexes over passages: building, opening, searching."""
