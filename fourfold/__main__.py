"""`python -m fourfold`. Guarded: spawned worker processes import this module again."""

from __future__ import annotations

from fourfold.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
