"""Starts and ends the trainer's processes, one per GPU, and runs the engine's calls on all of them."""
