"""Repositories of the hub: what is downloaded, what the cache answers, and how failures are named."""

from __future__ import annotations

import json
import os
import re
import socket
import sys
from pathlib import Path

import huggingface_hub.constants
import pytest

from fourfold import hub as hubs
from fourfold.cli import main as cli
from fourfold.config import DataSourceConfig
from fourfold.errors import ConfigError
from fourfold.install import install_command
from fourfold.model import folder as model_folder
from fourfold.model.tokenizer import Tokenizer
from fourfold_coordinator.data.sources import read_rows
from fourfold_coordinator.launch.run_folder import make_run_dir
from tests.fakes.hub_server import TOKEN, FakeHub
from tests.fakes.toy import make_config, write_model

DATA = "datasets/owner/name"
MODEL = "owner/small"


def jsonl(*questions: str) -> bytes:
    return "".join(json.dumps({"question": q}) + "\n" for q in questions).encode()


SPLITS = {
    "README.md": b"# A data set",
    "data/train-00000-of-00002.jsonl": jsonl("a", "b"),
    "data/train-00001-of-00002.jsonl": jsonl("c"),
    "data/test-00000-of-00001.jsonl": jsonl("t"),
    "load.py": b"raise SystemExit",
}


def questions(path: str = "hf:owner/name", split: str = "train") -> list[str]:
    return [row["question"] for row in read_rows(DataSourceConfig(path=path, split=split))]


def test_a_split_is_downloaded_once_and_then_read_without_the_hub(hub: FakeHub, cache: Path) -> None:
    commit = hub.add(DATA, SPLITS)
    assert questions() == ["a", "b", "c"]
    fetched = [request for request in hub.requests if request.startswith("GET datasets/")]
    assert {request.rpartition("/")[2] for request in fetched} == {
        "README.md",
        *(f"train-0000{i}-of-00002.jsonl" for i in (0, 1)),
    }
    hub.requests.clear()
    assert questions() == questions(f"hf:owner/name@{commit}") == ["a", "b", "c"]
    assert hub.requests == [], "the cache answers"


def test_an_array_of_the_hub_is_read(hub: FakeHub, cache: Path) -> None:
    hub.add(DATA, {"all.json": json.dumps([{"question": "a"}, {"question": "b"}], indent=1).encode()})
    assert questions(split="") == ["a", "b"]


def test_another_split_and_a_lost_file_are_downloaded(hub: FakeHub, cache: Path) -> None:
    hub.add(DATA, SPLITS)
    assert questions() == ["a", "b", "c"]
    assert questions(split="test") == ["t"]
    (lost,) = cache.rglob("train-00001-of-00002.jsonl")
    lost.unlink()
    assert questions() == ["a", "b", "c"], "half of a split is never read as the whole"


def test_a_branch_stays_at_its_commit_until_get_asks_again(
    hub: FakeHub, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old = hub.add(DATA, SPLITS)
    assert questions() == ["a", "b", "c"]
    new = hub.add(DATA, SPLITS | {"data/train-00001-of-00002.jsonl": jsonl("d")})
    assert questions() == ["a", "b", "c"]
    assert cli.main(["get", "hf:owner/name", "--split", "train"]) == 0
    assert f'In a recipe:\n[data.train]\npath = "hf:owner/name@{new}"\nsplit = "train"\n' in capsys.readouterr().out
    assert questions() == ["a", "b", "d"]
    assert questions(f"hf:owner/name@{old}") == ["a", "b", "c"]


def test_a_new_run_writes_the_commits_into_its_recipe(hub: FakeHub, cache: Path, tmp_path: Path) -> None:
    commit, model = hub.add(DATA, SPLITS), hub.add(MODEL, {"config.json": b"{}"})
    assert questions() == ["a", "b", "c"]
    train = [{"path": "hf:owner/name", "split": "train"}, {"path": "own.jsonl"}]
    config = make_config(tmp_path, data={"train": train}, model={"source": f"hf:{MODEL}"})
    run_dir, pinned = make_run_dir(config, "x", tmp_path / "runs")
    assert [source.path for source in pinned.data.train] == [f"hf:owner/name@{commit}", "own.jsonl"]
    assert pinned.model.source == f"hf:{MODEL}@{model}" and model in (run_dir / "config.toml").read_text()
    assert [source.title for source in pinned.data.train] == [source.title for source in config.data.train]
    hub.add(DATA, SPLITS | {"data/train-00001-of-00002.jsonl": jsonl("d")})
    assert cli.main(["get", "hf:owner/name", "--split", "train"]) == 0
    assert questions(pinned.data.train[0].path) == ["a", "b", "c"], "a resumed run has the same rows"


def test_get_without_a_network_names_the_hub_and_not_the_name(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        endpoint = f"http://127.0.0.1:{closed.getsockname()[1]}"
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", endpoint)
    assert cli.main(["get", "hf:owner/name"]) == 1
    assert f"hf:owner/name: {endpoint} cannot be reached" in capsys.readouterr().err
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert cli.main(["get", "hf:owner/name"]) == 1
    assert "HF_HUB_OFFLINE forbids a download" in capsys.readouterr().err


def test_get_fills_a_folder_that_is_a_source(hub: FakeHub, cache: Path, tmp_path: Path) -> None:
    hub.add(DATA, SPLITS)
    target = tmp_path / "mine"
    assert cli.main(["get", "hf:owner/name", "--to", str(target)]) == 0
    assert questions(str(target)) == ["a", "b", "c"] and questions(str(target), "test") == ["t"]
    assert not (target / "load.py").exists()


def test_a_model_is_taken_without_pickles_code_and_second_copies(hub: FakeHub, cache: Path, tmp_path: Path) -> None:
    files = {path.name: path.read_bytes() for path in write_model(tmp_path / "m").iterdir()}
    unwanted = {"pytorch_model.bin": b"x", "modeling.py": b"x", "original/model.safetensors": b"x"}
    hub.add(MODEL, files | unwanted | {"consolidated.safetensors": b"x"})
    folder = model_folder.resolve(f"hf:{MODEL}")
    assert {path.name for path in folder.iterdir()} == set(files)
    hub.requests.clear()
    model_folder.check(f"hf:{MODEL}")
    assert Tokenizer.load(f"hf:{MODEL}").encode("a") == Tokenizer.load(tmp_path / "m").encode("a")
    assert hub.requests == []


def test_get_finds_out_whether_a_name_is_a_model_or_a_data_set(
    hub: FakeHub, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.add(DATA, SPLITS)
    assert cli.main(["get", "hf:owner/name"]) == 0
    assert "3 files of hf:owner/name" in capsys.readouterr().out
    hub.add("owner/name", {"config.json": b"{}"})
    assert cli.main(["get", "hf:owner/name"]) == 1
    assert "a model and a data set of this name; add --kind" in capsys.readouterr().err
    assert cli.main(["get", "hf:owner/name", "--kind", "model"]) == 0
    assert cli.main(["get", "hf:owner/none"]) == 1
    assert "has no such model, or it is private" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("hf:owner/missing", r"hf:owner/missing: http://127.0.0.1:\d+ has no such dataset, or it is private; correct"),
        ("hf:owner/name@v9", "hf:owner/name@v9: it has no revision 'v9'; give a branch, a tag or a commit"),
        (
            "hf:owner/gated",
            r"its owner asks for consent; accept the terms on its page, and log in with `hf auth login`",
        ),
        ("hf:../../etc", "is no dataset of the hub; write hf:OWNER/NAME"),
        ("hf:owner/name@/tmp/ref", "is no dataset of the hub; write hf:OWNER/NAME"),
        ("hf:owner/na--me", "Cannot have -- or .. in repo_id: 'owner/na--me'. Correct the name"),
        ("hf:owner/scripted", r"no Parquet, JSONL or CSV file in it, and scripts .* add @refs/convert/parquet"),
    ],
)
def test_what_the_hub_refuses_is_named(hub: FakeHub, cache: Path, source: str, words: str) -> None:
    hub.add(DATA, SPLITS)
    hub.add("datasets/owner/gated", SPLITS)
    hub.repositories["datasets/owner/gated"].gated = True
    hub.add("datasets/owner/scripted", {"scripted.py": b""})
    with pytest.raises(ConfigError, match=words):
        questions(source)


def test_an_unknown_split_has_the_nearest_name(hub: FakeHub, cache: Path) -> None:
    hub.add(DATA, SPLITS)
    with pytest.raises(ConfigError, match=r"hf:owner/name: split = 'tests' is unknown; did you mean `test`\?"):
        questions(split="tests")
    with pytest.raises(ConfigError, match=r"hf:owner/name holds several splits; set split to one of: test, train"):
        questions(split="")


def test_a_token_opens_private_data_and_is_in_no_message(
    hub: FakeHub, cache: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    hub.add(DATA, SPLITS)
    hub.repositories[DATA].private = True
    with pytest.raises(ConfigError, match="or it is private"):
        questions()
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert questions() == ["a", "b", "c"]
    hub.status = 503
    with pytest.raises(ConfigError, match="HTTP 503") as error:
        questions(split="test")
    written = capfd.readouterr()
    assert TOKEN not in f"{error.value}{written.out}{written.err}"


def test_offline_only_the_cache_is_used(hub: FakeHub, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add(DATA, SPLITS)
    assert questions() == ["a", "b", "c"]
    hub.requests.clear()
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert questions() == ["a", "b", "c"]
    with pytest.raises(ConfigError, match="HF_HUB_OFFLINE forbids a download; run `fourfold get hf:owner/name`"):
        questions(split="test")
    assert hub.requests == []


def test_a_hub_that_cannot_be_reached_is_named_without_its_password(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", f"http://user:secret@127.0.0.1:{port}")
    with pytest.raises(ConfigError, match=rf"http://127.0.0.1:{port} cannot be reached") as error:
        questions()
    assert "secret" not in str(error.value)


def test_without_the_package_the_command_that_installs_it_is_named(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    monkeypatch.setitem(sys.modules, "huggingface_hub.constants", None)
    with pytest.raises(ConfigError, match=re.escape(install_command("fourfold[hub]"))):
        questions()
    assert cli.main(["get", "hf:owner/name"]) == 1 and "[hub]" in capsys.readouterr().err


def test_what_another_program_downloaded_is_used_without_a_network(
    hub: FakeHub, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    hub.add(DATA, SPLITS)
    huggingface_hub.snapshot_download("owner/name", repo_type="dataset")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert questions() == ["a", "b", "c"]
    assert "took hf:owner/name from the cache without asking the hub whether it is whole" in caplog.text


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (
            b"<html>log in</html>",
            r"http://127.0.0.1:\d+ answered what no hub does \(JSONDecodeError\); check HF_ENDPOINT",
        ),
        (b"[]", r"answered what no hub does \(TypeError\)"),
        (b'{"sha": "x"}', r"answered what no hub does \(KeyError\)"),
        (b'{"id": "o/n", "sha": "x", "siblings": [{"name": "a"}]}', r"answered what no hub does \(KeyError\)"),
        (b'{"id": "o/n", "sha": "x"}', "the hub names no commit of it"),
    ],
)
def test_an_answer_that_is_no_listing_is_named(hub: FakeHub, cache: Path, body: bytes, words: str) -> None:
    hub.answers["revision/main"] = (200, body)
    with pytest.raises(ConfigError, match=words):
        questions()


def test_the_status_of_a_refused_file_is_named(hub: FakeHub, cache: Path) -> None:
    hub.add(DATA, SPLITS)
    hub.answers["README.md"] = (403, b"")
    with pytest.raises(ConfigError, match=r"refused \(HTTP 403\); log in"):
        questions()


@pytest.mark.parametrize("name", ["train.parquet", "train.jsonl"])
def test_a_file_with_another_hash_is_deleted_and_named(
    hub: FakeHub, cache: Path, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.add(DATA, {name: jsonl("a")})
    hub.answers[name] = (200, jsonl("b"))
    for target in ([], ["--to", str(tmp_path / "mine")]):
        assert cli.main(["get", "hf:owner/name", *target]) == 1
        assert f"{name} was damaged on the way" in capsys.readouterr().err
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and path.read_bytes() == jsonl("b")]
    del hub.answers[name]
    assert cli.main(["get", "hf:owner/name"]) == 0


def test_a_link_in_the_folder_is_deleted_and_not_its_file(hub: FakeHub, cache: Path, tmp_path: Path) -> None:
    hub.add(DATA, {"train.jsonl": jsonl("a")})
    own, link = tmp_path / "own.jsonl", tmp_path / "mine" / "train.jsonl"
    assert cli.main(["get", "hf:owner/name", "--to", str(link.parent)]) == 0
    own.write_bytes(jsonl("mine"))
    os.utime(own, (1, 1))  # older than the download, so that huggingface_hub leaves it as it is
    link.unlink()
    link.symlink_to(own)
    assert cli.main(["get", "hf:owner/name", "--to", str(link.parent)]) == 1
    assert own.read_bytes() == jsonl("mine") and not link.is_symlink()


def test_a_cache_that_cannot_be_written_is_used(hub: FakeHub, cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    hub.add(DATA, SPLITS)
    huggingface_hub.snapshot_download("owner/name", repo_type="dataset")
    (cache / "datasets--owner--name" / "fourfold").write_text("")
    assert questions() == ["a", "b", "c"]
    assert "could not store the commit of hf:owner/name" in caplog.text


def test_a_listing_that_leaves_the_folder_is_not_followed(hub: FakeHub, cache: Path) -> None:
    outside = ["../../train-2.jsonl", "/etc/train.jsonl", "a/./train.jsonl", "a//train.jsonl", "a\0/train.jsonl"]
    hub.add(DATA, {"train.jsonl": jsonl("a"), **dict.fromkeys(outside, jsonl("evil"))})
    files = hubs.dataset_files("hf:owner/name", config="", split="train")
    assert [path.name for path in files] == ["train.jsonl"]
