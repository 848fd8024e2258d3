"""`fourfold export`: which export it takes, GGUF files, and uploads to a hub on loopback."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import gguf
import huggingface_hub
import huggingface_hub.constants
import pytest

from fourfold import config as configuration
from fourfold.errors import ConfigError
from fourfold.install import install_command
from fourfold_coordinator.cli import evaluate, export
from fourfold_coordinator.launch.run_folder import link_latest, locked
from fourfold_coordinator.launch.run_names import RUN_LOCK
from fourfold_coordinator.reporting.model_card import model_card
from fourfold_tools.gguf import write_gguf
from tests.fakes.hub_server import FakeHub
from tests.fakes.hub_uploads import TOKEN, UploadHub
from tests.support.tiny_models import write_tiny_model

RECIPE = configuration.dump(configuration.load("recipes/quickstart.toml")).replace(
    '"builtin:smollm2-135m-instruct"', '"/secret/place/base-model"'
)
REPORT = {
    "steps": 9,
    "eval_before": {"step": 0, "score": 0.25, "half_width": 0.03},
    "eval_after": {"step": 9, "score": 0.5, "half_width": None},
    "evals": [{"step": 3, "score": 0.375, "half_width": None}],
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny", "llama")


@pytest.fixture
def run(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A finished run with three exports."""
    folder = tmp_path / "runs" / "demo"
    for name in ("model-ema", "model", "model-step-3"):
        shutil.copytree(tiny, folder / name)
    (folder / "config.toml").write_text(RECIPE)
    (folder / "report.json").write_text(json.dumps(REPORT))
    monkeypatch.chdir(tmp_path)
    return folder


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[UploadHub]:
    with UploadHub() as server:
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", server.endpoint)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield server


def call(*words: object) -> int:
    parser = argparse.ArgumentParser()
    export.add_arguments(parser)
    return export.main(parser.parse_args([str(word) for word in words]))


def test_the_newest_export_is_taken_and_another_one_by_its_name(run: Path) -> None:
    link_latest(run)
    assert export.find_export("runs/demo") == run / "model"
    assert export.find_export("runs/latest", "model-ema") == run / "model-ema"
    assert export.find_export("runs/demo/model-step-3") == run / "model-step-3"
    (run / "model-step-3").rename(run / "model-step-12")  # the run was extended
    assert export.find_export("runs/demo") == run / "model-step-12"


def test_a_missing_export_is_named_with_those_that_are_there(run: Path) -> None:
    with pytest.raises(ConfigError, match=r"no export 'model-step-4'; did you mean `model-step-3`\?.*model-ema"):
        export.find_export("runs/demo", "model-step-4")
    with pytest.raises(ConfigError, match="not the folder of a run"):
        export.find_export("runs/demo/model", "model")
    for name in ("model", "model-ema", "model-step-3"):
        shutil.rmtree(run / name)
    with pytest.raises(ConfigError, match=r"neither an exported model nor a checkpoint.*--resume"):
        export.find_export("runs/demo")


def test_a_stopped_run_exports_its_last_checkpoint(
    tiny: Path, run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As `fourfold chat` does; a run in progress gives the newest that it has exported."""

    def export_checkpoint(config: object, run: Path, step: int, *_: object) -> Path:
        return Path(shutil.copytree(tiny, run / f"model-step-{step}"))

    monkeypatch.setattr(evaluate, "export_checkpoint", export_checkpoint)
    (run / "report.json").unlink()
    assert export.find_export("runs/demo") == run / "model", "stopped after the last export"
    shutil.rmtree(run / "model")
    for step in (2, 4):
        (run / "checkpoints" / f"step-{step:06}").mkdir(parents=True)
    with locked(run / RUN_LOCK, "it"):
        assert export.find_export("runs/demo") == run / "model-step-3"
    text = capsys.readouterr().err
    assert text.startswith("Taking runs/demo/model-step-3, of step 3: runs/demo is in progress and has not exported")
    assert export.find_export("runs/demo") == run / "model-step-4"
    shutil.rmtree(run / "model-step-3")
    shutil.rmtree(run / "model-step-4")
    with (
        locked(run / RUN_LOCK, "it"),
        pytest.raises(ConfigError, match=r"in progress .* step 4; stop it, or take weig"),
    ):
        export.find_export("runs/demo")


def test_a_checkpoint_is_exported_without_another_target(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("runs/demo", "--checkpoint", "3") == 0
    assert capsys.readouterr().out == "exported: runs/demo/model-step-3\n"
    assert call("runs/demo") == 2 and "or --checkpoint of a run" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="--checkpoint 4: runs/demo has the weights of step 3, 9; give one of these"):
        call("runs/demo", "--checkpoint", "4")
    with pytest.raises(ConfigError, match="both name weights"):
        call("runs/demo", "--checkpoint", "3", "--export", "model")
    with pytest.raises(ConfigError, match="run:demo is not the folder of a run; give one of runs/"):
        call("run:demo", "--checkpoint", "3")
    assert export.find_export("run:demo") == run / "model"


def test_a_file_is_written_once_and_replaced_only_by_force(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("runs/demo", "--export", "model-step-3", "--gguf", "demo.gguf") == 0
    assert "wrote demo.gguf" in capsys.readouterr().out
    fields = gguf.GGUFReader("demo.gguf").fields
    assert fields["general.name"].contents() == "demo-step-3"
    with pytest.raises(ConfigError, match=r"demo.gguf exists.*--force"):
        call("runs/demo", "--gguf", "demo.gguf")
    assert call("runs/demo", "--gguf", "demo.gguf", "--force", "--dtype", "f32") == 0
    assert gguf.GGUFReader("demo.gguf").fields["general.name"].contents() == "demo"
    assert write_gguf.DTYPES == export._DTYPES


def test_a_model_of_the_hub_keeps_its_name(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    with FakeHub() as server:
        server.add("owner/small", {path.name: path.read_bytes() for path in tiny.iterdir()})
        template = server.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", server.endpoint)
        monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        assert call("hf:owner/small@main", "--gguf", tmp_path / "small.gguf") == 0
    assert gguf.GGUFReader(tmp_path / "small.gguf").fields["general.name"].contents() == "small"


def test_options_of_the_other_target_are_refused(run: Path) -> None:
    with pytest.raises(ConfigError, match="--private and --revision go with --push"):
        call("runs/demo", "--gguf", "demo.gguf", "--private")
    with pytest.raises(ConfigError, match="--dtype and --force go with --gguf"):
        call("runs/demo", "--push", "me/demo", "--dtype", "f16")


def test_a_missing_package_says_what_to_install(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda **_: ())
    text = f"--gguf needs fourfold-tools, which is not installed; {install_command('fourfold-tools')}"
    with pytest.raises(ConfigError, match=re.escape(text)):
        call("runs/demo", "--gguf", "demo.gguf")


def test_an_upload_is_one_commit_of_the_folder_and_a_card(
    run: Path, hub: UploadHub, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "model" / ".cache").mkdir()
    (run / "model" / ".cache" / "token").write_text("hidden")
    (run / "model" / "adapter").mkdir()
    (run / "model" / "adapter" / "adapter_model.safetensors").write_bytes(b"lora")
    assert call("runs/demo", "--push", "me/demo", "--private") == 0
    repository = hub.repositories["me/demo"]
    assert repository.private and len(repository.commits) == 1
    sent = repository.branches["main"]
    assert sent.keys() == {"README.md", "adapter/adapter_model.safetensors"} | {
        path.name for path in (run / "model").iterdir() if path.is_file()
    }
    assert sent["model.safetensors"] == (run / "model" / "model.safetensors").read_bytes()
    assert sent["README.md"].decode() == model_card(run / "model")
    out = capsys.readouterr().out
    assert f"to {hub.endpoint}/me/demo, branch main" in out and "README.md (a model card)" in out
    assert f"uploaded: {hub.endpoint}/me/demo/commit/" in out and TOKEN not in out


def test_a_card_has_the_scores_and_the_recipe_and_no_local_path(run: Path) -> None:
    card = model_card(run / "model")
    assert card.startswith("---\nlibrary_name:") and "# quickstart\n" in card
    assert "`base-model`, trained by reinforcement learning with Fourfold" in card
    assert "| before | 0 | 0.250 +- 0.030 |\n| after | 9 | 0.500 |" in card
    assert "batch.prompts_per_step = 12" in card and "trainer.ranks" not in card  # the default
    assert "secret" not in card and str(run) not in card
    assert "| after | 3 | 0.375 |" in model_card(run / "model-step-3")
    assert "held-out" not in model_card(run / "model-ema")
    (run / "config.toml").write_text(RECIPE.replace("/secret/place/base-model", "hf:owner/base@main"))
    assert 'base_model: "owner/base"' in model_card(run / "model")


def test_a_folder_that_has_a_card_keeps_it_and_others_get_none(run: Path, tiny: Path, hub: UploadHub) -> None:
    (run / "model" / "README.md").write_text("mine")
    assert call("runs/demo", "--push", "me/demo") == 0
    assert hub.repositories["me/demo"].branches["main"]["README.md"] == b"mine"
    assert call(tiny, "--push", "me/plain") == 0
    assert "README.md" not in hub.repositories["me/plain"].branches["main"]


def test_weights_of_an_earlier_upload_are_deleted_on_the_branch_alone(tiny: Path, hub: UploadHub) -> None:
    assert call(tiny, "--push", "me/demo") == 0
    old = {"model-00001-of-00002.safetensors": b"old", "model.safetensors.index.json": b"{}", "notes.txt": b"kept"}
    hub.repositories["me/demo"].branches["main"].update(old)
    assert call(tiny, "--push", "me/demo", "--revision", "step-9") == 0
    branches = hub.repositories["me/demo"].branches
    assert not old.keys() - {"notes.txt"} & branches["step-9"].keys()
    assert branches["step-9"]["notes.txt"] == b"kept" and old.keys() <= branches["main"].keys()


def test_a_private_upload_never_goes_to_a_public_repository(tiny: Path, hub: UploadHub) -> None:
    assert call(tiny, "--push", "me/demo") == 0
    with pytest.raises(ConfigError, match="me/demo is public, so nothing was sent"):
        call(tiny, "--push", "me/demo", "--private")
    assert len(hub.repositories["me/demo"].commits) == 1


@pytest.mark.parametrize(
    ("part", "status", "message"),
    [
        ("repos/create", 401, r"refused \(HTTP 401\); check the name, and log in with `hf auth login`"),
        ("repos/create", 403, r"refused \(HTTP 403\)"),
        ("preupload", 403, r"refused \(HTTP 403\)"),
        ("preupload", 400, "answered HTTP 400"),
        ("objects/batch", 403, r"refused \(HTTP 403\)"),
        ("store/", 400, r"the upload failed \(.*; check the network"),
        ("commit", 404, r"refused \(HTTP 404\)"),
        ("repos/create", 200, r"the upload failed \('url'\); check the network"),
    ],
)
def test_a_refusal_of_the_hub_is_one_message(tiny: Path, hub: UploadHub, part: str, status: int, message: str) -> None:
    hub.statuses = {part: status}
    with pytest.raises(ConfigError, match=message) as caught:
        call(tiny, "--push", "me/demo")
    assert TOKEN not in caught.value.message
    assert not any(repository.commits for repository in hub.repositories.values())


def test_without_token_network_or_a_name_nothing_is_sent(
    tiny: Path, hub: UploadHub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="'demo' is no repository of the hub; write OWNER/NAME"):
        call(tiny, "--push", "demo")
    monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(ConfigError, match=r"no token for http://127.0.0.1"):
        call(tiny, "--push", "me/demo")
    assert hub.requests == []
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://user:key@127.0.0.1:1")
    with pytest.raises(ConfigError, match=r"http://127.0.0.1:1/me/demo: the upload failed") as caught:
        call(tiny, "--push", "me/demo")
    assert "key" not in caught.value.message
