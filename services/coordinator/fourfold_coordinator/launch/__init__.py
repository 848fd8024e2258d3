"""Starts and supervises the processes of a run, on this machine or through Ray."""
