"""Sources of weights in a trainer: dense, ZeRO-3, LoRA."""
