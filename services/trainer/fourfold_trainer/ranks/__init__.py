"""The processes of a trainer, one per GPU: their start and end, their commands, and all of them as one engine."""
