"""The gRPC services of the trainer."""
