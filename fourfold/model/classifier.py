"""Checks and describes the folder of a reward model, a sequence classifier with one label, without a tensor library.

The folder is that of `save_pretrained` of a Hugging Face `...ForSequenceClassification`, or, for a process reward
model, of a `...ForTokenClassification`: config.json, tokenizer.json and safetensors files. `fourfold plan` and the
reward service read it with the same rules.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from fourfold.errors import ConfigError
from fourfold.model import runs
from fourfold.model.folder import local_folder, read_json, resolve, tensor_entries
from fourfold.model.tokenizer import tokenizer_sha256

_KEY: Final = "reward.model.source"
_PICKLES: Final = ("*.bin", "*.pt", "*.pth", "*.ckpt")
CLASSIFIER: Final = "ForSequenceClassification"
"""End of the class names of reward models."""
STEP_CLASSIFIER: Final = "ForTokenClassification"
"""End of the class names of process reward models."""
# Names of the longest sequence in config.json, and in tokenizer_config.json (where "no limit" is 1e30).
_POSITIONS: Final = ("max_position_embeddings", "n_positions")
_NO_LIMIT: Final = 1 << 30
# Models whose first token has the position pad_token_id + 1, so that they cannot use all positions: RoBERTa has 514 of
# them for 512 tokens.
_OFFSET_TYPES: Final = frozenset(
    {
        *("camembert", "data2vec-text", "esm", "ibert", "lilt", "longformer", "luke", "markuplm", "mpnet", "roberta"),
        *("roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "xmod"),
    }
)
_DEFAULT_PAD: Final = 1  # of these models
_HASH_THREADS: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassifierFolder:
    """The checked folder of a reward model."""

    path: Path
    config: Mapping[str, Any]
    """Contents of config.json."""
    shapes: Mapping[str, tuple[int, ...]]
    """Shapes of all tensors by name, from the headers of the safetensors files."""

    @classmethod
    def read(cls, source: str, *, process: bool = False) -> ClassifierFolder:
        """Check a folder.

        Args:
            source: path of the folder, `hf:OWNER/NAME` or `run:NAME`, as `reward.model.source`.
            process: whether it must be a process reward model, which scores steps.

        Raises:
            ConfigError: the folder or a file of it is missing, the weights are pickles only, the model has code of its
                own, is a classifier of another kind or none, or has more labels.
        """
        # The folder that an expected run begins with may be that of a language model.
        expected = runs.is_expected(source, _KEY)
        path = resolve(source, key=_KEY) if expected else local_folder(source, _KEY)
        if not path.is_dir():
            raise ConfigError(
                f"{_KEY} = {source!r}: no such folder ({path.absolute()}); give a Hugging Face model folder, or "
                f"hf:OWNER/NAME for a model of the hub"
            )
        for name in ("config.json", "tokenizer.json"):
            if not (path / name).is_file():
                raise ConfigError(
                    f"{_KEY} = {source!r}: {path} has no {name}; save the model and its fast tokenizer there with "
                    f"save_pretrained"
                )
        files = sorted(path.glob("*.safetensors"))
        if not files:
            raise ConfigError(f"{_KEY} = {source!r}: {_without_safetensors(path)}")
        config = read_json(path / "config.json")
        shapes = {name: entry.shape for name, entry in tensor_entries(path).items()}
        folder = cls(path=path.resolve(), config=config, shapes=shapes)
        if not expected:
            folder._check(source, process=process)
        return folder

    def _check(self, source: str, *, process: bool) -> None:
        if self.config.get("auto_map"):
            raise ConfigError(
                f"{_KEY} = {source!r}: its config.json has auto_map: the model runs Python code of its folder, which "
                f"is never loaded; use a model that transformers has itself, or serve this one as a service of your "
                f"own (reward.target)"
            )
        names = self.config.get("architectures") or ["none"]
        ending, other = (STEP_CLASSIFIER, CLASSIFIER) if process else (CLASSIFIER, STEP_CLASSIFIER)
        if str(names[0]).endswith(other):
            raise ConfigError(
                f"{_KEY} = {source!r} is a {names[0]}, which scores {'the whole text' if process else 'steps'}, and "
                f'reward.model.kind = "{"process" if process else "score"}"; set kind = '
                f'"{"score" if process else "process"}", or use a ...{ending}'
            )
        if not str(names[0]).endswith(ending):
            raise ConfigError(
                f"{_KEY} = {source!r} is a {names[0]}; it must be a ...{ending} with one label: train one, or save it "
                f"with AutoModel{ending}"
            )
        if process and self.labels > 2:
            raise ConfigError(
                f"{_KEY} = {source!r} has {self.labels} labels; a process reward model has one, whose number is the "
                f"score, or the labels wrong and right"
            )
        if not process and (labels := self.labels) != 1:
            raise ConfigError(
                f"{_KEY} = {source!r} has {labels} labels; it must have one, which is the score: use a reward model, "
                f"or a function that makes a number of the labels"
            )

    @property
    def labels(self) -> int:
        """Number of labels: rows of the head if it is a `score`, else of config.json, where two are the default."""
        head = self.shapes.get("score.weight")
        if head is not None and len(head) == 2:
            return head[0]
        names = self.config.get("id2label")
        return len(names) if isinstance(names, dict) else int(self.config.get("num_labels") or 2)

    @property
    def parameter_count(self) -> int:
        """Parameters of all tensors in the files."""
        return sum(math.prod(shape) for shape in self.shapes.values())

    @property
    def longest(self) -> int | None:
        """Most tokens of one text, from config.json and tokenizer_config.json; None if neither has a limit."""
        found = [self.config.get(name) for name in _POSITIONS]
        if self.config.get("model_type") in _OFFSET_TYPES:
            pad = self.config.get("pad_token_id")
            unused = (pad if isinstance(pad, int) else _DEFAULT_PAD) + 1
            found = [value - unused for value in found if isinstance(value, int)]
        text_config = self.config.get("text_config")
        if isinstance(text_config, dict):
            found += [text_config.get(name) for name in _POSITIONS]
        tokenizer = self.path / "tokenizer_config.json"
        if tokenizer.is_file():
            found.append(read_json(tokenizer).get("model_max_length"))
        limits = [int(value) for value in found if isinstance(value, int | float) and 0 < value < _NO_LIMIT]
        return min(limits, default=None)

    def digest(self, *more: str) -> str:
        """Return 12 hex digits that change with the weights, config.json, the tokenizer and `more`."""
        return folder_digest(self.path, *more)[:12]


def folder_digest(path: Path, *more: str) -> str:
    """Return the SHA-256 (64 hex digits) of weights, config.json and tokenizer of a model folder, and of `more`.

    It reads all files once, several at a time: about as fast as the disk. Raises OSError: a file cannot be read.
    """
    files = sorted(path.glob("*.safetensors"))
    with ThreadPoolExecutor(max_workers=_HASH_THREADS) as threads:
        sums = list(threads.map(_sha256, files))
    parts = [
        *(name.encode() for name in more),
        (path / "config.json").read_bytes(),
        tokenizer_sha256(path),
        *(part for file, digest in zip(files, sums, strict=True) for part in (file.name.encode(), digest)),
    ]
    return hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()


def _sha256(file: Path) -> bytes:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").digest()


def _without_safetensors(path: Path) -> str:
    if any(next(path.glob(pattern), None) for pattern in _PICKLES):
        return (
            f"{path} has its weights as pickles only, which may run code when they are loaded; load the model where "
            f"you trust it and write it again with save_pretrained, which writes safetensors"
        )
    return f"{path} has no *.safetensors, the only format that is read; write it with save_pretrained"
