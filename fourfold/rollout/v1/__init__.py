"""Contains the generated messages and gRPC stubs of proto/fourfold/rollout/v1."""
