"""Samples from the policy: vLLM behind gRPC, token ids in, tokens and log-probabilities out."""
