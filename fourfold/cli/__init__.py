"""Implements the command `fourfold`."""
