"""Reads and writes models as GGUF files, the format of llama.cpp."""
