"""Trains any program that talks to an OpenAI endpoint."""
