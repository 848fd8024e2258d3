"""Each distribution alone: its wheel in an empty environment, outside the repository, with its real dependencies.

The pinned versions keep this repeatable, except where a test says that it lets the resolver choose.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(300)]

ROOT = Path(__file__).resolve().parents[2]
PROJECTS = {
    "fourfold": ROOT,
    "fourfold-rollout": ROOT / "services/rollout",
    "fourfold-trainer": ROOT / "services/trainer",
    "fourfold-reward": ROOT / "services/reward",
    "fourfold-coordinator": ROOT / "services/coordinator",
    "fourfold-gateway": ROOT / "services/gateway",
    "fourfold-tools": ROOT / "tools",
    "fourfold-bench": ROOT / "benchmarks",
}
HEAVY = {"torch", "transformers", "vllm", "deepspeed", "ray"}

# Imports every module below the packages of argv[1], but those that start with an item of argv[2], loads every entry
# point of ours, and prints what was imported.
_IMPORT_ALL = """
import importlib, importlib.metadata, json, pkgutil, sys
packages, skipped = json.loads(sys.argv[1]), tuple(json.loads(sys.argv[2]))
imported = []
def visit(name):
    module = importlib.import_module(name)
    imported.append(name)
    for child in pkgutil.iter_modules(getattr(module, "__path__", ())):
        full = f"{name}.{child.name}"
        if not full.startswith(skipped) and child.name != "__main__":
            visit(full)
for package in packages:
    visit(package)
groups = ("services", "commands", "tools", "checks", "functions", "verifiers")
for group in map("fourfold.{}".format, groups):
    for entry in importlib.metadata.entry_points(group=group):
        if not entry.module.startswith(skipped):
            entry.load()
print(json.dumps({"imported": imported, "modules": sorted({m.split(".")[0] for m in sys.modules}),
                  "where": importlib.import_module(packages[0]).__file__}))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Imports:
    """What a process had imported when it was done."""

    imported: list[str]
    modules: set[str]
    where: str


def _uv() -> str:
    beside = Path(sys.executable).with_name("uv")
    found = str(beside) if beside.exists() else shutil.which("uv")
    assert found, "no uv beside the interpreter; run scripts/setup dev"
    return found


def _run(*command: str | Path, cwd: Path, timeout: float = 240) -> str:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")} | {"DS_BUILD_OPS": "0"}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, f"{command[:3]} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with all wheels, built from a copy: setuptools leaves its build folders behind."""
    folder = tmp_path_factory.mktemp("wheels")
    copy = folder / "source"
    listed = _run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", cwd=ROOT)
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file() and not name.startswith(("tests/", "benchmarks/results/")):
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy / name)
    for path in PROJECTS.values():
        project = copy / path.relative_to(ROOT)
        _run(
            *(_uv(), "build", "--quiet", "--wheel", "--build-constraints", ROOT / "constraints.txt"),
            *("--python", sys.executable, "--out-dir", folder, project),
            cwd=copy,
        )
    return folder


@pytest.fixture
def install(tmp_path: Path, wheels: Path) -> Callable[..., Path]:
    """Return `install(requirement, *options)`, which installs it into an empty environment: its interpreter."""

    def make(requirement: str, *options: str | Path) -> Path:
        environment = tmp_path / "environment"
        python = environment / "bin/python"
        _run(_uv(), "venv", "--quiet", "--python", sys.executable, environment, cwd=tmp_path)
        _run(
            *(_uv(), "pip", "install", "--quiet", "--python", python, "--find-links", wheels),
            *("--build-constraints", ROOT / "constraints.txt", *options, requirement),
            cwd=tmp_path,
        )
        return python

    return make


def _import_all(python: Path, packages: list[str], *, skip: list[str], cwd: Path) -> Imports:
    text = _run(python, "-I", "-c", _IMPORT_ALL, json.dumps(packages), json.dumps(skip), cwd=cwd)
    found = json.loads(text.splitlines()[-1])
    return Imports(imported=found["imported"], modules=set(found["modules"]), where=found["where"])


# What needs an extra that this test leaves out.
_TENSORS = ["fourfold.nn", "fourfold.weights"]
_COORDINATOR_EXTRAS = [
    "fourfold_coordinator.launch.ray",
    "fourfold_coordinator.training.evaluation.harness",
    *(f"fourfold_coordinator.view.{name}" for name in ("app", "pages", "row_pages", "sample_pages", "templates")),
    *(f"fourfold_coordinator.sinks.{name}_sink" for name in ("mlflow", "tensorboard", "trackio", "wandb")),
]


def test_fourfold_alone_imports_all_that_needs_no_extra(install: Callable[..., Path], tmp_path: Path) -> None:
    python = install("fourfold", "--constraints", ROOT / "constraints.txt")
    found = _import_all(python, ["fourfold"], skip=[*_TENSORS, "fourfold.model.tokenizer"], cwd=tmp_path)
    assert {"fourfold.cli.main", "fourfold.service.lifecycle", "fourfold.rollout.client", "fourfold.trainer.v1"} <= set(
        found.imported
    )
    assert not found.modules & (HEAVY | {"tokenizers", "jinja2", "matplotlib", "fourfold_coordinator"})
    assert found.where.startswith(str(tmp_path)), "imported from the repository, not from the wheel"
    fourfold = python.with_name("fourfold")
    assert "usage: fourfold" in _run(fourfold, "--help", cwd=tmp_path)
    bench = subprocess.run([fourfold, "bench"], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert bench.returncode == 1
    assert bench.stderr.startswith("fourfold: `bench` is not installed here; ")
    # Not `-e benchmarks`: it comes from no checkout. Its environment has no pip.
    assert bench.stderr.endswith("uv pip install --python environment/bin/python fourfold-bench\n")
    program = "import fourfold\ntry:\n    fourfold.serve_reward\nexcept ImportError as error:\n    print(error)"
    assert _run(python, "-c", program, cwd=tmp_path).startswith(
        "fourfold.serve_reward needs fourfold-reward; run `uv pip"
    )


def test_tools_alone_make_certificates_without_torch(install: Callable[..., Path], tmp_path: Path) -> None:
    python = install("fourfold-tools", "--constraints", ROOT / "constraints.txt")
    found = _import_all(python, ["fourfold_tools"], skip=[], cwd=tmp_path)
    assert {"fourfold_tools.cli.certs", "fourfold_tools.gguf.write_gguf"} <= set(found.imported)
    assert not found.modules & (HEAVY | {"matplotlib", "fourfold_coordinator", "fourfold_reward", "fourfold_rollout"})
    assert "Certificates for" in _run(python.with_name("fourfold"), "certs", "files", cwd=tmp_path)
    assert (tmp_path / "files/ca.pem").exists()


def test_only_its_own_wheel_has_the_benchmarks(wheels: Path) -> None:
    with_benchmarks = set()
    for wheel in wheels.glob("*.whl"):
        names = zipfile.ZipFile(wheel).namelist()
        if any("bench" in name.lower() for name in names):
            with_benchmarks.add(wheel.name.partition("-")[0])
    assert with_benchmarks == {"fourfold_bench"}


def test_fourfold_tells_type_checkers_that_it_is_typed(install: Callable[..., Path], tmp_path: Path) -> None:
    package = next((install("fourfold", "--no-deps").parents[1] / "lib").glob("python3.*/site-packages/fourfold"))
    assert (package / "py.typed").exists()
    assert (package / "rollout/v1/rollout_service_pb2.pyi").exists()


def test_fourfold_alone_writes_the_protos(install: Callable[..., Path], tmp_path: Path) -> None:
    fourfold = install("fourfold", "--constraints", ROOT / "constraints.txt").with_name("fourfold")
    _run(fourfold, "proto", "written", cwd=tmp_path)
    names = [path for path in ROOT.glob("proto/**/*.*") if path.suffix in (".proto", ".binpb")]
    assert len(names) > 10
    for path in names:
        assert (tmp_path / "written" / path.relative_to(ROOT / "proto")).read_bytes() == path.read_bytes()


def test_reward_alone_scores_without_torch(install: Callable[..., Path], tmp_path: Path) -> None:
    python = install("fourfold-reward", "--constraints", ROOT / "constraints.txt")
    extras = ["fourfold_reward.reference", "fourfold_reward.models"]
    found = _import_all(python, ["fourfold_reward"], skip=extras, cwd=tmp_path)
    assert {"fourfold_reward.servicer", "fourfold_reward.scorers.judge"} <= set(found.imported)
    assert "exact_match" in _run(python.with_name("fourfold"), "serve", "reward", "--list", cwd=tmp_path)
    assert "serve_reward" in _run(python, "-c", "import fourfold; print(fourfold.serve_reward)", cwd=tmp_path)
    assert not found.modules & (HEAVY | {"fourfold_coordinator", "fourfold_rollout", "tokenizers"})


def test_coordinator_alone_imports_without_torch(install: Callable[..., Path], tmp_path: Path) -> None:
    python = install("fourfold-coordinator", "--constraints", ROOT / "constraints.txt")
    found = _import_all(python, ["fourfold_coordinator"], skip=_COORDINATOR_EXTRAS, cwd=tmp_path)
    assert {"fourfold_coordinator.training.loop", "fourfold_coordinator.reporting.run_service"} <= set(found.imported)
    assert not found.modules & (HEAVY | {"fourfold_reward", "fourfold_rollout", "fourfold_trainer"})
    assert "--launcher" in _run(python.with_name("fourfold"), "run", "--help", cwd=tmp_path)
    (view,) = python.parents[1].glob("lib/python3.*/site-packages/fourfold_coordinator/view")
    assert (view / "templates/run.html").exists() and (view / "static/view.css").exists()


def test_gateway_alone_starts_without_torch(install: Callable[..., Path], tmp_path: Path) -> None:
    python = install("fourfold-gateway", "--constraints", ROOT / "constraints.txt")
    found = _import_all(python, ["fourfold_gateway"], skip=[], cwd=tmp_path)
    assert {"fourfold_gateway.serve", "fourfold_gateway.http.server"} <= set(found.imported)
    assert not found.modules & (HEAVY | {"fourfold_coordinator", "fourfold_reward", "fourfold_rollout"})
    installed = {path.name.partition("-")[0] for path in python.parents[1].glob("lib/python3.*/site-packages/*")}
    assert not installed & HEAVY
    assert "--engine" in _run(python.with_name("fourfold"), "serve", "gateway", "--help", cwd=tmp_path)


@pytest.mark.parametrize("protobuf", ["5.29.6", "6.33.6", "7.36.2"])
def test_stubs_load_on_every_protobuf_that_an_engine_may_bring(
    protobuf: str, install: Callable[..., Path], tmp_path: Path
) -> None:
    install("fourfold", f"protobuf=={protobuf}")
    python = tmp_path / "environment/bin/python"
    found = _import_all(python, ["fourfold"], skip=[*_TENSORS, "fourfold.model.tokenizer"], cwd=tmp_path)
    assert "fourfold.coordinator.v1.run_service_pb2_grpc" in found.imported
    version = _run(python, "-c", "import google.protobuf as p; print(p.__version__)", cwd=tmp_path)
    assert version.strip() == protobuf


@pytest.fixture
def pinned() -> list[str | Path]:
    """Options that install the repository's pinned versions, as scripts/setup does."""
    links = [part for place in os.environ.get("PIP_FIND_LINKS", "").split() for part in ("--find-links", place)]
    return ["--constraints", ROOT / "constraints.txt", "--overrides", ROOT / "overrides.txt", *links]


@pytest.mark.timeout(600)
def test_rollout_alone_imports_without_deepspeed_and_ray(
    install: Callable[..., Path], pinned: list[str | Path], tmp_path: Path
) -> None:
    python = install("fourfold-rollout[cpu]", *pinned)
    outside = _import_all(python, ["fourfold_rollout"], skip=["fourfold_rollout.vllm"], cwd=tmp_path)
    assert "fourfold_rollout.generate.servicer" in outside.imported
    assert "vllm" not in outside.modules, "only fourfold_rollout.vllm may import vLLM"
    # Those two need triton, which vLLM for CUDA brings.
    on_gpus = ["fourfold_rollout.vllm.logprob_kernel", "fourfold_rollout.vllm.patches.logprobs_v2"]
    inside = _import_all(python, ["fourfold_rollout.vllm"], skip=on_gpus, cwd=tmp_path)
    assert "vllm" in inside.modules
    assert not (outside.modules | inside.modules) & {"deepspeed", "ray", "fourfold_trainer", "fourfold_coordinator"}


@pytest.mark.timeout(600)
def test_trainer_alone_imports_without_vllm_and_ray(
    install: Callable[..., Path], pinned: list[str | Path], tmp_path: Path
) -> None:
    python = install("fourfold-trainer", *pinned)
    outside = _import_all(python, ["fourfold_trainer"], skip=["fourfold_trainer.zero"], cwd=tmp_path)
    assert "fourfold_trainer.service.servicer" in outside.imported
    assert "deepspeed" not in outside.modules, "only fourfold_trainer.zero may import DeepSpeed"
    inside = _import_all(python, ["fourfold_trainer.zero"], skip=[], cwd=tmp_path)
    assert {"deepspeed", "torch"} <= inside.modules
    assert not (outside.modules | inside.modules) & {"vllm", "ray", "fourfold_rollout", "fourfold_coordinator"}


@pytest.mark.timeout(600)
def test_reference_alone_imports_without_deepspeed_and_vllm(
    install: Callable[..., Path], pinned: list[str | Path], tmp_path: Path
) -> None:
    python = install("fourfold-reward[reference,models,http]", *pinned)
    # That one needs triton, which PyTorch for CUDA brings.
    found = _import_all(python, ["fourfold_reward"], skip=["fourfold_reward.models.kernels"], cwd=tmp_path)
    assert {"fourfold_reward.reference.servicer", "fourfold_reward.models.backend"} <= set(found.imported)
    assert "torch" in found.modules
    assert not found.modules & {"deepspeed", "vllm", "ray"}


@pytest.mark.timeout(600)
def test_the_tests_of_lm_eval_pass_with_its_extra(pinned: list[str | Path], tmp_path: Path) -> None:
    """The environment of the other tests lacks it: it brings scikit-learn, which transformers then imports.

    Every rank, engine and reference would take 140 MiB more, and a start 1 to 3 s of CPU more.
    """
    extra, constraints = tmp_path / "lm-eval", ("--build-constraints", ROOT / "constraints.txt")
    _run(
        *(_uv(), "pip", "install", "--quiet", "--python", sys.executable, "--target", extra),
        *(*constraints, *pinned, "lm-eval"),
        cwd=tmp_path,
    )
    program = f"import sys, pytest; sys.path.append({str(extra)!r}); sys.exit(pytest.main(sys.argv[1:]))"
    words = ("-p", "no:cacheprovider", "-k", "harness", "tests/contract/test_evaluation.py")
    printed = _run(sys.executable, "-c", program, *words, cwd=ROOT)
    assert " 3 passed" in printed and "skipped" not in printed, printed
