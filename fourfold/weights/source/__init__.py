"""Sources of weights in a trainer: whole parameters, ZeRO-3 partitions, LoRA adapters, alone or merged."""
