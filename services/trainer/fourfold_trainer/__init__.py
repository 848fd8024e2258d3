"""Trains the policy: DeepSpeed ZeRO behind one gRPC endpoint, on any number of ranks."""
