"""gRPC channels, servers, limits, and the encoding of arrays and errors."""
