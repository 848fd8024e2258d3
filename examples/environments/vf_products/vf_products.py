"""An environment of the library verifiers: one-digit products, rewarded for the last number of the reply.

After `pip install examples/environments/vf_products`,
`verifiers.load_environment("vf-products")` finds it. A recipe has `kind = "verifiers"` and `source = "vf-products"`;
see recipes/agents_verifiers.toml.
"""

from __future__ import annotations

import re
from typing import Any

import verifiers as vf
from datasets import Dataset  # type: ignore[import-not-found]

SYSTEM_PROMPT = "Reply with only the final answer."


def last_number(parser: Any, completion: Any, answer: str) -> float:
    """Return 1 if the last number of the reply equals the answer."""
    numbers = re.findall(r"\d+", parser.parse_answer(completion) or "")
    return float(bool(numbers) and int(numbers[-1]) == int(answer))


def reply_length(parser: Any, completion: Any) -> float:
    """Return the characters of the reply, which the metrics have; its weight in the reward is 0."""
    return float(len(parser.parse_answer(completion) or ""))


def load_environment(highest: int = 9) -> vf.Environment:
    """Make the environment. `vf-eval` attempts the rows of the data set; a run of Fourfold brings its own tasks."""
    digits = range(highest + 1)
    rows = [{"question": f"What is {a} * {b}?", "answer": str(a * b)} for a in digits for b in digits]
    rubric = vf.Rubric(funcs=[last_number, reply_length], weights=[1.0, 0.0], parser=vf.Parser())
    return vf.SingleTurnEnv(dataset=Dataset.from_list(rows), system_prompt=SYSTEM_PROMPT, rubric=rubric)
