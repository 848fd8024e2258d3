"""Checkpoints and optimizer shards on disk."""
