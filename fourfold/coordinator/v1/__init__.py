"""Contains the generated messages and gRPC stubs of proto/fourfold/coordinator/v1."""
