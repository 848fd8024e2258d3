"""Attacks by clients, peers and sandboxed programs."""
