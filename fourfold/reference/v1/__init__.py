"""Contains the generated messages and gRPC stubs of proto/fourfold/reference/v1."""
