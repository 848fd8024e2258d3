"""Optimizers over ZeRO shards, and the moving average of weights."""
