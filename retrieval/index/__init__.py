"""Indexes over passages: building, opening, searching, fusing, measuring."""
