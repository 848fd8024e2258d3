"""Measures fine-tuning and training on pairs through `fourfold run`, and TRL's trainers on the same rows."""
