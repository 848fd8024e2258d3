"""Attacks: what no client, peer or program may bring about."""
