"""gRPC channels and servers with Fourfold's limits, authentication and errors."""
