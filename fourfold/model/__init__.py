"""Model folders and their tokenizers."""
