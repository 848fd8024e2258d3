"""How much a reader must hold to follow the training loop and the optimizer step: the modules that they import."""

from __future__ import annotations

import ast
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def _module_files() -> dict[str, Path]:
    """Return the sources without generated stubs, by the name of the module."""
    folders = ["fourfold", "services", "tools"]
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *folders]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=50, check=True).stdout.split()
    found = {}
    for name in listed:
        if name.endswith(".py") and "_pb2" not in name and (ROOT / name).exists():
            parts = list(Path(name).with_suffix("").parts)
            parts = parts[{"services": 2, "tools": 1}.get(parts[0], 0) :]
            if parts[-1:] == ["__init__"]:
                parts.pop()
            if parts:
                found[".".join(parts)] = ROOT / name
    return found


def _imports(name: str, path: Path, modules: dict[str, Path]) -> Iterator[str]:
    """Yield the modules that one imports anywhere: also in functions, and for type checkers alone.

    The `__init__` of a package counts only where it is imported itself.
    """
    package = name.split(".")[: None if path.name == "__init__.py" else -1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                yield from [found for found in (f"{base}.{alias.name}", base) if found in modules][:1]


def _closure(start: str, modules: dict[str, Path]) -> set[str]:
    """Return a module and all that it imports, directly or not."""
    seen, left = {start}, [start]
    while left:
        name = left.pop()
        new = set(_imports(name, modules[name], modules)) - seen
        seen |= new
        left += new
    return seen


@pytest.mark.parametrize(
    ("start", "most_files", "most_lines"),
    [
        ("fourfold_coordinator.training.loop", 108, 18_600),
        ("fourfold_trainer.step.train_step", 56, 8_200),
    ],
)
def test_a_reader_can_hold_what_a_module_imports(start: str, most_files: int, most_lines: int) -> None:
    modules = _module_files()
    closure = _closure(start, modules)
    lines = sum(modules[name].read_text(encoding="utf-8").count("\n") for name in closure)
    assert len(closure) <= most_files and lines <= most_lines, (
        f"{start} imports {len(closure)} files with {lines} lines, directly or not; at most {most_files} with "
        f"{most_lines}. Find the new import by a comparison with the main branch. Import a type or a constant from the "
        f"module that defines it, and move it out of a module that does more. Pass an object in, and declare the "
        f"methods that are used as a Protocol (training/ports.py). Raise the limit only for code that a reader of "
        f"{start} needs"
    )


def test_imports_in_functions_and_for_type_checkers_count(tmp_path: Path) -> None:
    sources = {
        "a.one": "if TYPE_CHECKING:\n    from . import two\n",
        "a.two": "def f():\n    from b.three import name\n",
        "b.three": "import four\n",
        "four": "import os\n",
        "five": "import a.one\n",
    }
    modules = {name: tmp_path / f"{name}.py" for name in sources}
    for name, text in sources.items():
        modules[name].write_text(text)
    assert _closure("a.one", modules) == {"a.one", "a.two", "b.three", "four"}
