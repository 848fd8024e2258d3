"""One answer of a process of its own: for what a test cannot do in its own process, such as starting vLLM."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from typing import Any


def answer_of(work: Callable[..., None], *arguments: Any, seconds: float = 280) -> Any:
    """Run `work(pipe, *arguments)` in a new interpreter, and return the first thing it sends; it is killed then."""
    context = multiprocessing.get_context("spawn")
    pipe, other = context.Pipe()
    process = context.Process(target=work, args=(other, *arguments))
    process.start()
    other.close()
    try:
        assert pipe.poll(seconds), f"no answer after {seconds} s"
        return pipe.recv()
    finally:
        process.kill()
        process.join(10)
