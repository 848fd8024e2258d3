"""`fourfold bench gateway`: calls through a gateway against direct calls of its engine and vLLM's own HTTP server."""
