"""Fetches pages of the web: checked, bounded, and reduced to their text."""
