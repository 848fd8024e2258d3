"""The rollout service: samples from the policy with vLLM and serves tokens and log-probabilities over gRPC."""
