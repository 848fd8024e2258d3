"""Shared tensor code (extra `torch`)."""
