"""Imports of libraries that make a million objects, such as vLLM and DeepSpeed."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def fast_imports(*, without: str = "") -> Iterator[None]:
    """Import large libraries in a block without garbage collections, and exclude them from later collections.

    In the block an import of `without`, an optional dependency of a library, fails unless it was imported before.

    Modules keep nearly all that their import makes. Collections that visit it again and again take 4 of the 16 s of
    vLLM's import, and 1 of DeepSpeed's 5.5 s. A later one that visits it stops the process for half a second.
    """
    enabled = gc.isenabled()
    gc.disable()
    hidden = bool(without) and without not in sys.modules
    if hidden:
        sys.modules[without] = None  # type: ignore[assignment]  # Python's mark of a module that cannot be imported
    try:
        yield
    finally:
        if hidden:
            del sys.modules[without]
        gc.freeze()
        if enabled:
            gc.enable()
