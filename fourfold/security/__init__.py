"""Authenticates callers with certificates and bearer tokens, and decides what each may call."""
