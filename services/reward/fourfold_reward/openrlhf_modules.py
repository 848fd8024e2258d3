"""Supplies the modules of OpenRLHF that reward and agent files import, where OpenRLHF is not installed.

OpenRLHF itself needs Ray, vLLM and flash-attn, which a reward service has no use for.
"""

from __future__ import annotations

import importlib.util
import logging
import sys
import types
from typing import Any, Final

from fourfold.reward.function import ScoreInput
from fourfold_reward import verifiers

PACKAGE: Final = "openrlhf"
_BOXED: Final = "\\boxed{"


def provide() -> None:
    """Make `openrlhf.utils` importable; an installed OpenRLHF stays as it is."""
    if PACKAGE in sys.modules or importlib.util.find_spec(PACKAGE) is not None:
        return
    package, utils, logs = (types.ModuleType(f"{PACKAGE}{end}") for end in ("", ".utils", ".utils.logging_utils"))
    sys.modules |= {module.__name__: module for module in (package, utils, logs)}
    _set(package, utils=utils)
    _set(utils, logging_utils=logs, extract_boxed_answer=extract_boxed_answer, grade_answer=grade_answer)
    _set(logs, init_logger=logging.getLogger)


def extract_boxed_answer(text: str) -> str | None:
    r"""Return the content of the last complete \boxed{...} of a text, or None."""
    end = len(text)
    while (begin := text.rfind(_BOXED, 0, end)) >= 0:
        depth = 1
        for at in range(begin + len(_BOXED), len(text)):
            depth += {"{": 1, "}": -1}.get(text[at], 0)
            if not depth:
                return text[begin + len(_BOXED) : at]
        end = begin
    return None


def grade_answer(given_answer: str | None, ground_truth: str) -> bool:
    """Return whether two answers are equal, as texts or as mathematics."""
    if given_answer is None:
        return False
    given, truth = given_answer.strip(), str(ground_truth).strip()
    if given == truth:
        return True
    math_verify: Any = verifiers.load("math_verify", {})
    return bool(math_verify(ScoreInput(sample_id="", prompt="", completion=f"${given}$", answer=truth)) == 1.0)


def _set(module: types.ModuleType, **attributes: Any) -> None:
    for name, value in attributes.items():
        setattr(module, name, value)
