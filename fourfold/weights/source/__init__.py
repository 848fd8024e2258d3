"""Sources of weights in a trainer: whole parameters, ZeRO-3 partitions, merged LoRA adapters."""
