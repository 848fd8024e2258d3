"""Certificates, tokens and permissions of callers."""
