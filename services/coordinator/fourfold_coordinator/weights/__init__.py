"""Coordinates weight updates from the trainer to the rollout engines."""
