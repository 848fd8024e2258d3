"""Evaluates the policy on held-out sets, during a run and on its own."""
