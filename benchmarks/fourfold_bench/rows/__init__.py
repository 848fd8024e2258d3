"""Measures supervised fine-tuning through `fourfold run`, and TRL's trainer on the same rows."""
