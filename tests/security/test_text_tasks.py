"""Compares the committed list of verifiers that run text as code with the installed packages."""

from __future__ import annotations

import ast
import builtins
import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from fourfold_reward import ScoreInput, verifiers
from fourfold_reward.verifiers import EVALUATING_TASKS

RUNS_CODE = {eval, exec, compile, builtins.__import__}
RUNS_CODE_MODULES = {
    "os",
    "subprocess",
    "pickle",
    "marshal",
    "importlib",
    "runpy",
    "ctypes",
    "multiprocessing",
    "shelve",
}


def functions_of(task: str) -> Iterator[Callable[..., Any]]:
    """Yield `score_answer` of a task, and every function of the package that it calls, also indirectly."""
    from reasoning_gym.factory import DATASETS

    owner = DATASETS[task][0]
    waiting: list[Callable[..., Any]] = [owner.score_answer]
    seen: set[Callable[..., Any]] = set()
    while waiting:
        function = inspect.unwrap(waiting.pop())
        if function in seen:
            continue
        seen.add(function)
        yield function
        for target in targets_of(function, owner):
            if isinstance(target, type):
                methods = vars(target).values()
                waiting += [m for m in methods if isinstance(m, types.FunctionType) and of_package(m)]
            elif isinstance(target, types.FunctionType) and of_package(target):
                waiting.append(target)


def of_package(target: Any) -> bool:
    return str(getattr(target, "__module__", "")).startswith("reasoning_gym")


def targets_of(function: Callable[..., Any], owner: type) -> Iterator[Any]:
    """Yield the objects that a function calls or names, as far as they can be resolved."""
    source = inspect.getsource(function)
    tree = ast.parse(f"class _:\n{source}" if source[0].isspace() else source)
    known = {**vars(builtins), **inspect.getclosurevars(function).globals, "self": owner, "cls": owner}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                known[alias.asname or alias.name.partition(".")[0]] = __import__(alias.name)
        if isinstance(node, ast.ImportFrom):
            module = __import__(node.module or "", fromlist=["_"], level=0) if not node.level else None
            known |= {alias.asname or alias.name: getattr(module, alias.name, None) for alias in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) or (isinstance(node, ast.Name) and node.id not in ("self", "cls")):
            yield resolve(node, known)


def resolve(node: ast.expr, known: dict[str, Any]) -> Any:
    if isinstance(node, ast.Name):
        return known.get(node.id)
    if isinstance(node, ast.Attribute):
        return getattr(resolve(node.value, known), node.attr, None)
    return None


def runs_text(task: str) -> bool:
    """Return whether a scorer reaches code execution, or sympy, which parses texts with `eval`."""
    from reasoning_gym.factory import DATASETS

    for function in functions_of(task):
        for target in targets_of(function, DATASETS[task][0]):
            module = target.__name__ if isinstance(target, types.ModuleType) else str(getattr(target, "__module__", ""))
            top = module.partition(".")[0]
            if callable(target) and (top == "sympy" or top in RUNS_CODE_MODULES):
                return True
            if isinstance(target, types.BuiltinFunctionType) and target in RUNS_CODE:
                return True
    return False


@pytest.mark.filterwarnings("ignore::SyntaxWarning")
def test_list_of_tasks_that_run_text_is_that_of_the_installed_package() -> None:
    from reasoning_gym.factory import DATASETS

    tasks = set(DATASETS) - {"composite"}
    assert len(tasks) > 100
    assert {task for task in tasks if runs_text(task)} == set(EVALUATING_TASKS)


def test_math_verify_gives_only_arithmetic_to_sympys_parser(monkeypatch: pytest.MonkeyPatch) -> None:
    """math_verify calls `parse_expr`, but only with texts that match a pattern of digits, spaces and operators."""
    from math_verify import parser

    one = parser.parse_expr_cached("1")
    parsed: list[str] = []

    def record(text: str) -> Any:
        parsed.append(text)
        return one

    monkeypatch.setattr(parser, "parse_expr_cached", record)
    verify = verifiers.load("math_verify", {})
    attack = "__import__('os').system('exit')"
    for shape in (
        "{}",
        "${}$",
        "\\boxed{{{}}}",
        "the final answer is 1 + ({}) . I hope",
        "1+{}",
        "= 2*3+{} ",
        "2 + 3*4",
    ):
        verify(ScoreInput(sample_id="s", prompt="", completion=shape.format(attack), answer="7"))
    assert parsed
    assert not [text for text in parsed if any(character.isalpha() or character == "_" for character in text)]
