"""Overrides of vLLM's private code."""
