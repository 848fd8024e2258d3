"""Writes docs/reference: the recipe, the metrics, the RPCs and the commands. --check fails if a page is out of date.

python -m scripts.reference [--check]
"""

from __future__ import annotations

import argparse
import sys

from scripts.reference import FOLDER, PAGES


def main() -> int:
    """Write the pages, or compare them with those of the folder; return the exit code."""
    parser = argparse.ArgumentParser(description="Writes docs/reference from the code.")
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a page is out of date")
    check = parser.parse_args().check
    old = []
    for name, make in PAGES.items():
        path, text = FOLDER / name, make()
        if check and (not path.is_file() or path.read_text() != text):
            old.append(name)
        elif not check:
            FOLDER.mkdir(exist_ok=True)
            path.write_text(text)
    if old:
        sys.stderr.write(f"docs/reference: {', '.join(old)} out of date; run 'make reference'\n")
    return 1 if old else 0


if __name__ == "__main__":
    sys.exit(main())
