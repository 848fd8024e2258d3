"""Helpers of tests: models, drivers, processes."""
