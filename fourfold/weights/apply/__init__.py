"""Applies received weights to an engine's model: in place, or with the engine's own loaders."""
