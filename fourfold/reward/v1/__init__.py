"""Contains the generated messages and gRPC stubs of proto/fourfold/reward/v1."""
