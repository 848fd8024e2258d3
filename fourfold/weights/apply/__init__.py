"""Writes received weights into an engine's model."""
