"""gRPC channels, servers, limits, and the encoding of samples and errors."""
