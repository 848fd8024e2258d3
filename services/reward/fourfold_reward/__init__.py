"""Scores trajectories with functions and verifiers, and serves reference log-probabilities."""
