"""Manages the processes, hardware, disk, clock and logs of this machine."""
