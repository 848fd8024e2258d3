"""Builds the examples in other languages as their READMEs say."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from fourfold.cli import main as cli_main

ROOT = Path(__file__).resolve().parents[2]
# Where Debian's packages put Go sources.
GO_PACKAGES = Path(os.environ.get("FOURFOLD_TEST_GO_PACKAGES", "/usr/share/gocode"))
Command = Callable[[str], list[str]]


def run(words: list[str], cwd: Path, seconds: float, env: Mapping[str, str]) -> str:
    """Run a command to its end; return its output, or fail with it."""
    done = subprocess.run(
        words, cwd=cwd, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=seconds, check=False
    )
    assert done.returncode == 0, f"{words} failed:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


def _copy(language: str, folder: Path, name: str = "") -> Path:
    copy = folder / (name or language)
    ignored = shutil.ignore_patterns("node_modules", "dist", "protos", "gen", "package-lock.json")
    shutil.copytree(ROOT / "examples" / language, copy, ignore=ignored)
    assert cli_main.main(["proto", str(copy / "protos")]) == 0
    return copy


def build_typescript(folder: Path) -> tuple[Path, Command]:
    """Return the folder of the built programs, and the command of each of them; skip the test without a toolchain."""
    if not shutil.which("npm"):
        pytest.skip("npm is not installed; install Node 20 to test examples/typescript")
    copy = _copy("typescript", folder)
    run(["npm", "install", "--no-audit", "--no-fund", "--ignore-scripts"], copy, 180, os.environ)
    run(["npm", "run", "build"], copy, 120, os.environ)
    return copy, lambda program: ["node", f"dist/{program}.js"]


def build_go(folder: Path) -> tuple[Path, Command]:
    """Do the same for Go."""
    go = shutil.which("go")
    if not go:
        pytest.skip("go is not installed; install Go 1.24 to test examples/go")
    copy = _copy("go", folder / "src", name="fourfold")
    env = {**os.environ, "GOBIN": str(copy / "bin"), "GOTOOLCHAIN": "local"}
    plugins = ["google.golang.org/protobuf/cmd/protoc-gen-go", "google.golang.org/grpc/cmd/protoc-gen-go-grpc"]
    if (GO_PACKAGES / "src/google.golang.org/grpc").is_dir():
        env |= {"GO111MODULE": "off", "GOPATH": f"{folder}:{GO_PACKAGES}"}
        run([go, "build", "-o", "bin/", *plugins], copy, 300, env)
    else:
        versions = re.findall(r"google\.golang\.org/\S+@\S+", (copy / "README.md").read_text())
        try:
            run([go, "install", *versions], copy, 300, env)
        except AssertionError as error:
            if "dial tcp" not in str(error):
                raise
            pytest.skip(
                "Go modules cannot be downloaded; install golang-google-{grpc,genproto}-dev to test examples/go"
            )
        run([go, "mod", "tidy"], copy, 300, env)
    options = [f"--{plugin}_{kind}" for plugin in ("go", "go-grpc") for kind in ("out=.", "opt=module=fourfold")]
    options += [f"--plugin=bin/{plugin.rpartition('/')[2]}" for plugin in plugins]
    protos = [str(path) for name in ("agent", "rollout", "types") for path in copy.glob(f"protos/fourfold/{name}/v1/*")]
    run([sys.executable, "-m", "grpc_tools.protoc", "-I", str(copy / "protos"), *options, *protos], copy, 60, env)
    run([go, "build", "-o", "bin/", "fourfold/cmd/sample", "fourfold/cmd/agent"], copy, 300, env)
    return copy, lambda program: [f"bin/{program}"]
