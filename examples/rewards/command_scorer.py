#!/usr/bin/env python3
"""A scorer as a program: it reads one sample per line from stdin and writes one result per line to stdout.

    [reward]
    command = ["python", "examples/rewards/command_scorer.py"]

It needs no package of Fourfold, and may be in any language.
"""

from __future__ import annotations

import json
import sys


def score(sample: dict[str, str]) -> dict[str, object]:
    """Return a result: the share of the words of the answer that the completion has."""
    words = sample["answer"].split()
    if not words:
        return {"abstain": "NO_ANSWER"}
    found = [word for word in words if word in sample["completion"]]
    return {"score": len(found) / len(words), "components": {"words": len(words)}}


def main() -> None:
    """Answer each line with one line, at once: a result in a buffer is no result."""
    for line in sys.stdin:
        sample = json.loads(line)
        sys.stdout.write(json.dumps({"id": sample["id"], **score(sample)}) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
