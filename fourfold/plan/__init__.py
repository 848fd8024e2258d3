"""Derives from a recipe the sizes, limits, memory and description of a run, for `fourfold plan` and the services."""
