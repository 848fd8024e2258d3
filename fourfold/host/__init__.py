"""Processes, GPUs, disk, clock and logs of this machine."""
