"""The import contracts in pyproject.toml, and the modules that are loaded when everything is installed."""

from __future__ import annotations

import ast
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HEAVY = {"torch", "transformers", "vllm", "deepspeed", "ray"}

# They import packages of extras, which need not be installed.
_EXTRAS = [f"fourfold_coordinator.sinks.{name}_sink" for name in ("mlflow", "tensorboard", "trackio", "wandb")]
_EXTRAS += ["fourfold_coordinator.training.evaluation.harness"]

_LOADED = """
import importlib, json, pkgutil, sys
package, skipped = sys.argv[1], tuple(sys.argv[2:])
names = [package]
for name in names:
    if name.startswith(skipped) or name.endswith("__main__"):
        continue
    path = getattr(importlib.import_module(name), "__path__", ())
    names += [f"{name}.{child.name}" for child in pkgutil.iter_modules(path)]
print(json.dumps(sorted({m.split(".")[0] for m in sys.modules})))
"""


def _lint(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache", "--config", "pyproject.toml"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=50, check=False)


def _loaded(*arguments: str) -> set[str]:
    command = [sys.executable, "-W", "ignore", "-c", _LOADED, *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_import_contracts_hold() -> None:
    done = _lint(ROOT)
    assert done.returncode == 0, done.stdout
    assert ", 0 broken" in done.stdout


# A line that breaks a contract, and the module to which it is added.
_VIOLATIONS = (
    ("fourfold/rpc/server.py", "import torch", "fourfold needs no tensor library"),
    ("fourfold/host/clock.py", "import fourfold.rpc.codec", "Layers of fourfold"),
    ("fourfold/rpc/server.py", "import fourfold.plan.batch", "Calls and services need no plan"),
    ("fourfold/host/clock.py", "import fourfold_bench", "Nothing imports the benchmarks"),
    ("fourfold_coordinator/serve.py", "import fourfold.weights.manifest", "nn and weights are imported"),
    ("fourfold/rpc/server.py", "def f():\n    import vllm", "vLLM is imported by its engine"),
    ("fourfold_trainer/flops.py", "import fourfold_reward", "Services and tools stand on fourfold"),
    ("fourfold/cli/main.py", "def f():\n    import fourfold_tools", "Services and tools stand on fourfold"),
    ("fourfold/cli/main.py", "def f():\n    import fourfold_reward", "Services and tools stand on fourfold"),
    ("fourfold_tools/cli/conformance.py", "import fourfold_rollout", "Services and tools stand on fourfold"),
    ("fourfold_gateway/turn_sampler.py", "import fourfold_rollout.load", "Services and tools stand on fourfold"),
    ("fourfold_trainer/engine.py", "import fourfold_trainer.step.train_step", "Layers of the trainer"),
    ("fourfold_coordinator/training/loop.py", "import ray", "Ray is imported by its launcher"),
    ("fourfold_coordinator/state/ledger.py", "import fourfold_coordinator.serve", "Layers of the coordinator"),
    ("fourfold_trainer/step/train_step.py", "import deepspeed", "DeepSpeed is imported by its engine"),
    ("fourfold_rollout/engine.py", "import fourfold_rollout.warm_up", "Layers of the rollout service"),
    ("fourfold_gateway/turn_sampler.py", "import torch", "The gateway needs no tensor library"),
)


def test_each_violation_breaks_its_contract(tmp_path: Path) -> None:
    for package in (ROOT / "fourfold", ROOT / "tools/fourfold_tools", *ROOT.glob("services/*/fourfold_*")):
        if package.suffix != ".egg-info":
            shutil.copytree(package, tmp_path / package.name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for module, line, _ in _VIOLATIONS:
        with (tmp_path / module).open("a") as file:
            file.write(f"\n\n{line}\n")
    done = _lint(tmp_path)
    assert done.returncode != 0
    _, *parts = re.split(r"^(.+)\n-{3,}\n", done.stdout.partition("Broken contracts")[2], flags=re.MULTILINE)
    reports = dict(zip(parts[::2], parts[1::2], strict=True))
    for module, line, contract in _VIOLATIONS:
        (report,) = [text for title, text in reports.items() if title.startswith(contract)]
        importer, imported = module.removesuffix(".py").replace("/", "."), line.split()[-1]
        assert f"{importer} -> {imported} (l." in report


_VLLM_PRIVATE = ("fourfold_rollout/vllm/patches/", "fourfold_rollout/vllm/engine.py", "fourfold_rollout/vllm/launch.py")


def test_vllms_private_modules_are_imported_in_few_places() -> None:
    """import-linter sees no modules inside a foreign package, so that this contract is a test."""
    importers = set()
    for path in (
        *ROOT.glob("fourfold/**/*.py"),
        *ROOT.glob("tools/**/*.py"),
        *ROOT.glob("services/*/fourfold_*/**/*.py"),
    ):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if any(f"{name}.".startswith("vllm.v1.") for name in names):
                importers.add(str(path))
    assert any("/patches/" in name for name in importers)
    assert not {name for name in importers if not any(part in name for part in _VLLM_PRIVATE)}


def _modules_of(source: str, packages: set[str]) -> set[str]:
    """Return the modules of packages that a source names: in any import, and in strings as "package.module"."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.ImportFrom(module=str(module)):
                names.add(module)
            case ast.Import():
                names.update(alias.name for alias in node.names)
            case ast.Constant(value=str(text)):
                names.add(text)
    return {name for name in names if re.split(r"[.:]", name)[0] in packages}


def test_fourfold_names_no_module_of_another_distribution() -> None:
    """import-linter sees neither the strings of lazy imports nor what only type checkers import."""
    packages = {
        path.parent.name for place in ("*", "services/*") for path in ROOT.glob(f"{place}/fourfold_*/__init__.py")
    }
    assert {"fourfold_bench", "fourfold_gateway", "fourfold_reward"} <= packages
    lazy = 'def f():\n    import_module("fourfold_reward.serve")\nif TYPE_CHECKING:\n    import fourfold_rollout.load'
    assert _modules_of(lazy, packages) == {"fourfold_reward.serve", "fourfold_rollout.load"}
    sources = {path: path.read_text() for path in ROOT.glob("fourfold/**/*.py")}
    assert {str(path): found for path, text in sources.items() if (found := _modules_of(text, packages))} == {}


def test_the_shared_package_loads_nothing_heavy() -> None:
    assert not _loaded("fourfold", "fourfold.nn", "fourfold.weights") & HEAVY


def test_the_schema_of_recipes_loads_no_numpy() -> None:
    """Losses and estimators belong to the schema, and `fourfold plan` answers in half a second."""
    assert not _loaded("fourfold.config") & (HEAVY | {"numpy"})


def test_the_coordinator_loads_nothing_heavy() -> None:
    assert not _loaded("fourfold_coordinator", "fourfold_coordinator.launch.ray", *_EXTRAS) & HEAVY


def test_the_gateway_loads_nothing_heavy() -> None:
    assert not _loaded("fourfold_gateway") & HEAVY


def test_rewards_load_nothing_heavy() -> None:
    assert not _loaded("fourfold_reward", "fourfold_reward.models", "fourfold_reward.reference") & HEAVY
    assert not _loaded("fourfold_reward.models.backend") & HEAVY


def test_services_load_their_engine_only_when_it_starts() -> None:
    assert "vllm" not in _loaded("fourfold_rollout", "fourfold_rollout.vllm")
    assert "deepspeed" not in _loaded("fourfold_trainer", "fourfold_trainer.zero")
