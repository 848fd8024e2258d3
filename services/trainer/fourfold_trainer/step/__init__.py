"""Runs one training step: advantages, micro-batches, optimizer step, metrics."""
