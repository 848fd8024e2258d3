"""What the engine's process died of, in its own words."""

from __future__ import annotations

import logging

from fourfold_rollout.vllm.launch import CrashNote


def test_the_first_error_that_ends_it_is_kept() -> None:
    note, core = CrashNote(), logging.getLogger("vllm.v1.engine.core")

    def fails(words: str, message: str) -> None:
        try:
            raise ValueError(words)
        except ValueError:
            core.exception(message, "sleep")

    fails("no memory", "Invocation of %s method failed")
    fails("odd prompt", "Unexpected error pre-processing request %s")
    assert note.read() == "", "it goes on after those"
    fails("no such token", "EngineCore encountered a fatal error in %s.")
    fails("nobody there", "and what follows of it in %s")
    assert note.read().startswith("ValueError: no such token (")
