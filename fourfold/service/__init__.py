"""Lifecycle of a service process and its membership in a run."""
