"""`fourfold export RUN|FOLDER`: writes a model as one GGUF file, or uploads it to the Hugging Face Hub.

fourfold export runs/demo --gguf demo.gguf                      its newest export, for llama.cpp
fourfold export runs/demo --export model-step-40 --gguf 40.gguf
fourfold export runs/demo --checkpoint 40                       that checkpoint, as runs/demo/model-step-40
fourfold export runs/demo --push me/demo --private              the Hugging Face folder, with a model card
"""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path
from typing import Final

from fourfold import hub
from fourfold.errors import ConfigError
from fourfold.hub import upload
from fourfold.install import find_tool
from fourfold.model import folder as model_folder
from fourfold.text import choices, format_bytes

from ..launch.run_folder import find_run
from ..launch.run_names import CONFIG_FILE, MODEL_FOLDER
from ..reporting.model_card import model_card
from .evaluate import exported_weights, newest_model

_DTYPES: Final = ("bf16", "f16", "f32")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", help="folder of a run, a model folder, hf:OWNER/NAME, run:NAME or builtin:NAME")
    parser.add_argument(
        "--export", default="", metavar="NAME", help="of a run: model, model-ema or model-step-N; default: the newest"
    )
    parser.add_argument(
        "--checkpoint",
        default="",
        metavar="STEP|best|last",
        help="of a run: these weights; a checkpoint is written as model-step-N into the folder of the run first",
    )
    target = parser.add_mutually_exclusive_group()
    target.add_argument("--gguf", type=Path, metavar="FILE.gguf", help="write this file, for llama.cpp")
    target.add_argument("--push", default="", metavar="OWNER/NAME", help="upload the folder to the Hugging Face Hub")
    parser.add_argument("--dtype", choices=_DTYPES, help="--gguf: of the matrices, default: bf16")
    parser.add_argument("--force", action="store_true", help="--gguf: replace a file of that name")
    parser.add_argument("--private", action="store_true", help="--push: into a private repository")
    parser.add_argument("--revision", metavar="BRANCH", help="--push: default: main")


def main(args: argparse.Namespace) -> int:
    """Write or upload a model; return the exit code."""
    if not (args.gguf or args.push or args.checkpoint):
        print("fourfold export: give --gguf FILE.gguf, --push OWNER/NAME, or --checkpoint of a run", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # raises KeyboardInterrupt, so that no part is left
    if args.push and (args.dtype or args.force):
        raise ConfigError("--dtype and --force go with --gguf; remove them")
    if args.gguf is not None and (args.private or args.revision):
        raise ConfigError("--private and --revision go with --push; remove them")
    if args.checkpoint and args.export:
        raise ConfigError("--checkpoint and --export both name weights of the run; give one of them")
    folder = _checkpoint(args.source, args.checkpoint) if args.checkpoint else find_export(args.source, args.export)
    if args.gguf is not None:
        _write(folder, args.gguf, dtype=args.dtype or "bf16", force=args.force, title=_title(folder, args.source))
    elif not args.push:
        print(f"exported: {folder}")
    else:
        _push(folder, args.push, private=args.private, branch=args.revision or "main")
    return 0


def _checkpoint(source: str, wanted: str) -> Path:
    run = find_run(Path(source))
    if not (run / CONFIG_FILE).is_file():
        raise ConfigError(f"--checkpoint {wanted}: {source} is not the folder of a run; give one of runs/")
    return exported_weights(run, wanted)[1]


def find_export(source: str, name: str = "") -> Path:
    """Return the model folder of a run or of another source.

    Args:
        source: folder of a run, model folder, hf:OWNER/NAME or builtin:NAME.
        name: export of the run; empty: the newest of the policy, apart from its moving average.

    Raises:
        ConfigError: there is none.
    """
    run = find_run(Path(source))
    if not (run / CONFIG_FILE).is_file():
        if name:
            raise ConfigError(f"--export {name}: {source} is not the folder of a run; name the model folder itself")
        return model_folder.resolve(source)
    exports = {path.parent.name: path.parent for path in run.glob("[!.]*/config.json")}
    if name and name not in exports:
        raise ConfigError(f"{run} has no export {name!r}; {choices(name, sorted(exports))}")
    return model_folder.resolve(str(exports[name] if name else newest_model(run)))


def _write(folder: Path, path: Path, *, dtype: str, force: bool, title: str) -> None:
    if path.exists() and not force:
        raise ConfigError(f"{path} exists; choose another name, or replace it with --force")
    write = find_tool("gguf-writer", "--gguf").load()
    write(folder, path, dtype=dtype, name=title)
    print(f"wrote {path}: {folder} in {dtype}, {format_bytes(path.stat().st_size)}")


def _push(folder: Path, repository: str, *, private: bool, branch: str) -> None:
    made = upload.prepare(folder, repository, card=model_card(folder), private=private, branch=branch)
    names = [*made.files, *([f"{upload.CARD} (a model card)"] if made.card else [])]
    print(f"{len(names)} files, {format_bytes(made.size)}, of {folder}")
    print("".join(f"  {name}\n" for name in names) + f"to {made.address}, branch {branch}", flush=True)
    print(f"uploaded: {upload.send(made)}")


def _title(folder: Path, source: str) -> str:
    """Return the name of a model: that of its run or repository, if it has one."""
    if (folder.parent / CONFIG_FILE).is_file():
        return f"{folder.parent.name}{folder.name.removeprefix(MODEL_FOLDER)}"
    if source.startswith(hub.PREFIX):  # the name of its folder is a commit
        return hub.Repository.parse(source, "model").name.rpartition("/")[2]
    return folder.name
