"""Backends that get scores from a program or from a server of another project."""

from __future__ import annotations
