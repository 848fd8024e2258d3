"""Holds requests and tokens during a weight update."""
