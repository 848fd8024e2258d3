"""Measures `fourfold view` in a browser, over a finished run of many trajectories."""
