"""Finds, converts and describes model folders, and tokenizes text with their tokenizers."""
