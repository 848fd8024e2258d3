"""The public API: light to import, typed, the same from version to version, and all that the examples use."""

from __future__ import annotations

import ast
import difflib
import hashlib
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

import fourfold
from fourfold.contract import CONTRACT_VERSION, DESCRIPTOR_SET, PROTO_DIR
from fourfold.install import install_command

ROOT = Path(__file__).resolve().parents[2]
SNAPSHOT = Path(__file__).with_name("public_api.txt")
CONTRACT_SNAPSHOT = Path(__file__).with_name("contract_version.txt")
UPDATE = "FOURFOLD_UPDATE_SNAPSHOT"
EXAMPLES = sorted(ROOT.glob("examples/**/*.py"))
# These two need torch, which is an extra of this distribution.
HEAVY = {"DenseSource", "Publisher", "WeightSender"}
# This example shows the contract without any library of ours.
STUBS_ONLY = ROOT / "examples/reward_service.py"
# They need no client of ours: environments run inside a service, and any OpenAI client can call a gateway.
WITHOUT_CLIENTS = [
    *ROOT.glob("examples/agent_*.py"),
    *ROOT.glob("examples/environments/**/*.py"),
    ROOT / "examples/rewards/command_scorer.py",
]


def _run(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=50, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def _signature(value: Any) -> str:
    try:
        text = str(inspect.signature(value))
    except (TypeError, ValueError):
        return ""
    return re.sub(r" at 0x[0-9a-f]+", "", text)


def _describe(name: str) -> list[str]:
    """Return one line for a public name, and one for each public member of a class of ours."""
    value = getattr(fourfold, name)
    if not inspect.isclass(value):
        return [f"{name}{_signature(value) if callable(value) else ''}"]
    if not value.__module__.startswith("fourfold") or hasattr(value, "DESCRIPTOR"):
        return [name]  # a message: buf compares the contract
    bases = ", ".join(base.__name__ for base in value.__bases__ if base not in (object, Exception))
    lines = [f"{name}({bases}){_signature(value.__init__)}"]
    inherited = {*dir(Exception), *dir(BaseModel)}
    for member in sorted(m for m in dir(value) if not m.startswith("_") and m not in inherited):
        found = inspect.getattr_static(value, member)
        kind = "property" if isinstance(found, property) else ""
        function = getattr(value, member)
        lines.append(f"    {name}.{member}{_signature(function) if callable(function) else ''} {kind}".rstrip())
    return lines


def test_names_and_signatures_are_those_of_the_snapshot() -> None:
    found = "".join(f"{line}\n" for name in sorted(set(fourfold.__all__) - HEAVY) for line in _describe(name))
    if os.environ.get(UPDATE):
        SNAPSHOT.write_text(found)
    changes = list(difflib.unified_diff(SNAPSHOT.read_text().splitlines(), found.splitlines(), "snapshot", "now", n=0))
    assert not changes, "\n".join([*changes, f"meant? write it with {UPDATE}=1, and add it to CHANGELOG.md"])


def test_every_public_name_has_a_docstring() -> None:
    for name in sorted(set(fourfold.__all__) - HEAVY - {"__version__", "METRICS"}):
        value = getattr(fourfold, name)
        if hasattr(value, "DESCRIPTOR"):
            continue  # a message or an enum, which has comments in proto/
        assert inspect.getdoc(value), name


def test_the_lists_of_the_module_agree() -> None:
    tree = ast.parse(Path(fourfold.__file__).read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    typed = {
        f"{node.module}.{alias.asname}"
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.asname
    }
    assert typed == {f"{module}.{name}" for module, names in fourfold._MODULES.items() for name in names}
    functions = {node.name for node in block.body if isinstance(node, ast.FunctionDef)}
    assert functions == fourfold._FUNCTIONS.keys()
    assert len(fourfold.__all__) == len(typed) + len(functions) + 1 and set(fourfold.__all__) <= set(dir(fourfold))


def test_a_client_has_the_same_methods_with_and_without_asyncio() -> None:
    for service in ("Rollout", "Trainer", "Reward", "Reference", "Coordinator"):
        plain, with_asyncio = getattr(fourfold, f"{service}Client"), getattr(fourfold, f"Async{service}Client")
        methods = {name for name in vars(with_asyncio) if not name.startswith("_")}
        assert methods == {name for name in vars(plain) if not name.startswith("_")}
        for name in methods:
            assert _signature(getattr(plain, name)) == _signature(getattr(with_asyncio, name))


def test_the_import_loads_nothing_of_weight() -> None:
    text = "import sys; before = set(sys.modules); import fourfold; print(*sorted(set(sys.modules) - before))"
    loaded = set(_run(text).split())
    assert {name for name in loaded if name.startswith("fourfold")} == {"fourfold"}
    assert not loaded & {"grpc", "numpy", "torch", "google.protobuf", "pydantic", "asyncio"}


def test_a_client_loads_no_schema_and_no_tokenizer() -> None:
    loaded = set(_run("import sys; from fourfold import RolloutClient; print(*sorted(sys.modules))").split())
    assert not loaded & {"pydantic", "tokenizers", "jinja2", "torch"}


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'RolloutCleint'.*fourfold\.__all__"):
        _ = fourfold.RolloutCleint


def test_a_name_whose_distribution_is_missing_says_what_to_install() -> None:
    text = """
import importlib.metadata, fourfold
importlib.metadata.entry_points = lambda **_: ()
try:
    fourfold.serve_reward
except ImportError as error:
    print(error)
"""
    command = install_command("fourfold-reward")
    assert f"fourfold.serve_reward needs fourfold-reward; run `{command}`" in _run(text)


def test_a_name_whose_extra_is_missing_says_what_to_install() -> None:
    text = """
import sys, fourfold
sys.modules["torch"] = None
try:
    fourfold.DenseSource
except ImportError as error:
    print(error)
"""
    command = install_command("fourfold[torch]")
    assert f"fourfold.DenseSource needs torch; run `{command}`" in _run(text)


def test_type_checkers_see_the_options_of_serve_reward() -> None:
    """`fourfold` imports no service, and so has the signature a second time."""
    tree = ast.parse(Path(fourfold.__file__).read_text())
    (seen,) = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == "serve_reward"]
    real = inspect.signature(fourfold.serve_reward).parameters.values()
    assert [(a.arg, ast.unparse(a.annotation)) for a in (*seen.args.args, *seen.args.kwonlyargs) if a.annotation] == [
        (parameter.name, parameter.annotation) for parameter in real
    ]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_the_examples_use_the_public_api_alone(path: Path) -> None:
    imported: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add(str(node.module))
            if node.module == "fourfold":
                assert {alias.name for alias in node.names} <= set(fourfold.__all__)
    ours = {name for name in imported if name.startswith("fourfold")}
    if path == STUBS_ONLY:
        assert all(".v1" in name for name in ours)
    elif path in WITHOUT_CLIENTS:
        assert ours <= {"fourfold_reward.environment"}
    else:
        assert ours == {"fourfold"}


def test_a_change_of_the_contract_changes_its_version() -> None:
    digest = hashlib.sha256((PROTO_DIR / DESCRIPTOR_SET).read_bytes()).hexdigest()
    if os.environ.get(UPDATE) and not CONTRACT_SNAPSHOT.read_text().startswith(f"{CONTRACT_VERSION} "):
        CONTRACT_SNAPSHOT.write_text(f"{CONTRACT_VERSION} {digest}\n")
    assert CONTRACT_SNAPSHOT.read_text() == f"{CONTRACT_VERSION} {digest}\n", (
        f"the contract changed: raise the minor version of CONTRACT_VERSION in fourfold/contract.py, then write "
        f"{CONTRACT_SNAPSHOT.name} with {UPDATE}=1"
    )
