"""The processes of a trainer, one per GPU."""
