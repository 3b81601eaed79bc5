"""Sampling by SGLang servers over HTTP."""
