"""Attention over whole rows (training) and over cached pages (decode)."""
