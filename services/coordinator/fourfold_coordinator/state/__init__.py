"""Durable state of a run, and its conditions."""
