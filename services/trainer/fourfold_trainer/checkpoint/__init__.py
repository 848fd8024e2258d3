"""Checkpoints and model exports on disk."""
