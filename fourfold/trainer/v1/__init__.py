"""Contains the generated messages and gRPC stubs of proto/fourfold/trainer/v1."""
