"""Backends that ask something else for a score: a program, or a server of another project."""

from __future__ import annotations
