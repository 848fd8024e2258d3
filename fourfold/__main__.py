"""Runs the command line as `python -m fourfold`."""

from __future__ import annotations

from fourfold.cli.main import main

# Processes that multiprocessing spawns import this module again, under another name.
if __name__ == "__main__":
    raise SystemExit(main())
