"""Contains the generated messages of proto/fourfold/types/v1."""
