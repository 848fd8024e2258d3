"""Tracks the members of a run, and chooses a replica for each call."""
