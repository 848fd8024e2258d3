"""Pausing of an engine: requests wait, samples stop, tokens are held back, memory is freed."""
