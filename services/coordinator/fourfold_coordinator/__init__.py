"""Runs the training loop: registry, ledger, routing, weight updates, and the display of a run."""
