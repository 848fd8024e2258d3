"""Computes batch metrics, the diagnosis of each step, and the report of a run; serves the run's status."""
