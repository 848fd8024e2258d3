"""`fourfold get hf:OWNER/NAME`: downloads a model or a data set of the Hugging Face Hub."""

from __future__ import annotations

import argparse
from contextlib import suppress
from pathlib import Path

from fourfold import hub
from fourfold.config import toml_value
from fourfold.errors import ConfigError
from fourfold.hub.repository import Kind


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="hf:OWNER/NAME", help="a model or a data set; with @REVISION, not the newest")
    parser.add_argument("--kind", choices=["model", "dataset"], help="needed if the hub has both under this name")
    parser.add_argument("--split", default="", help="split of a data set; default: all")
    parser.add_argument("--config", default="", help="configuration (subset) of a data set; default: all")
    parser.add_argument("--revision", default="", metavar="R", help="branch, tag or commit, in place of @REVISION")
    parser.add_argument("--to", type=Path, metavar="FOLDER", help="folder for the files, in place of the cache")


def main(args: argparse.Namespace) -> int:
    """Download the newest commit of a revision, and print its name for recipes; return the exit code."""
    source = f"{args.source}@{args.revision}" if args.revision else args.source
    kind: Kind = args.kind or ("dataset" if args.split or args.config else _kind(source))
    repository = hub.Repository.parse(source, kind)
    if kind == "model" and (args.split or args.config):
        raise ConfigError("--split and --config are for data sets, and --kind is model; remove them")
    chosen = args.split or args.config
    select = hub.select_split(source, args.config, args.split) if chosen else hub.select_all(kind)
    files = hub.download(repository, select, args.to)
    place = str(args.to) if args.to else f"hf:{repository.name}@{files.commit}"
    print(f"{len(files.names)} files of {source} at commit {files.commit} are in {files.folder}")
    table, keys = "model", {"source": place}
    if kind == "dataset":
        table, keys = "data.train", {"path": place, "split": args.split, "config": args.config}
    print(f"In a recipe:\n[{table}]", *(f"{key} = {toml_value(keys[key])}" for key in keys if keys[key]), sep="\n")
    return 0


def _kind(source: str) -> Kind:
    """Return the kind of a repository of the hub: a model, unless only a data set has this name."""
    kinds: list[Kind] = ["model", "dataset"]
    found: list[Kind] = []
    for kind in kinds:
        with suppress(hub.NotOnHub):
            hub.ask(hub.Repository.parse(source, kind))
            found.append(kind)
    if len(found) > 1:
        raise ConfigError(
            f"{source}: the hub has a model and a data set of this name; add --kind model or --kind dataset"
        )
    return found[0] if found else "model"
