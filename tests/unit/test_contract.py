"""The files and the version of the contract, for clients in any language."""

from __future__ import annotations

from pathlib import Path

import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorSet

from fourfold.cli import main as cli_main
from fourfold.contract import CONTRACT_VERSION, DESCRIPTOR_SET, PROTO_DIR, contract_problem

ROOT = Path(__file__).resolve().parents[2]
MAJOR = int(CONTRACT_VERSION.partition(".")[0])


def _ours() -> FileDescriptorSet:
    return FileDescriptorSet.FromString((PROTO_DIR / DESCRIPTOR_SET).read_bytes())


def test_every_proto_names_its_generated_code_after_its_package() -> None:
    files = [file for file in _ours().file if file.package.startswith("fourfold.")]
    assert len(files) == len(list((ROOT / "proto").glob("fourfold/*/v1/*.proto")))
    for file in files:
        name = file.package.split(".")[1]
        assert file.options.go_package == f"fourfold/{name}/v1;{name}v1", file.name
        assert file.options.java_package == file.package, file.name
        assert file.options.java_multiple_files, file.name
        assert file.options.csharp_namespace == f"Fourfold.{name.title()}.V1", file.name


def test_the_descriptor_set_needs_no_other_file() -> None:
    files = {file.name: file for file in _ours().file}
    assert {name for file in files.values() for name in file.dependency} <= set(files)
    assert "google/protobuf/duration.proto" in files


def test_the_command_writes_every_proto_and_the_descriptor_set(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli_main.main(["proto", str(tmp_path / "new")]) == 0
    written = {path.relative_to(tmp_path / "new"): path.read_bytes() for path in (tmp_path / "new").rglob("*.*")}
    sources = [*ROOT.glob("proto/fourfold/*/v1/*.proto"), ROOT / "proto" / DESCRIPTOR_SET]
    errors = {"google/rpc/status.proto", "google/rpc/error_details.proto"}  # of googleapis-common-protos
    assert all(b"package google.rpc;" in written.pop(Path(name)) for name in errors)
    assert written == {path.relative_to(ROOT / "proto"): path.read_bytes() for path in sources}
    assert f"contract {CONTRACT_VERSION}" in capsys.readouterr().out


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert cli_main.main(["proto", str(tmp_path / "file")]) == 1
    assert "the protos cannot be written there" in capsys.readouterr().err


@pytest.mark.parametrize("version", ["", CONTRACT_VERSION, f"{MAJOR}.999"])
def test_a_service_of_the_same_major_version_is_accepted(version: str) -> None:
    assert contract_problem(version) == ""


@pytest.mark.parametrize(
    ("version", "remedy"),
    [
        (f"{MAJOR + 1}.0", "upgrade this client"),
        (f"{MAJOR - 1}.9", "upgrade the service"),
        (f"{MAJOR}", "must be MAJOR.MINOR"),
        (f"{MAJOR}.0\n", "must be MAJOR.MINOR"),
        ("9" * 5000 + ".0", "must be MAJOR.MINOR"),
    ],
)
def test_another_version_is_refused_with_a_remedy(version: str, remedy: str) -> None:
    assert remedy in contract_problem(version)
