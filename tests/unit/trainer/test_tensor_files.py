"""Parts of safetensors files are read exactly, and files written piece by piece are those of `save_file`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers

from fourfold.errors import ConfigError
from fourfold.weights.source.fused_params import ParameterSlice
from fourfold_trainer.checkpoint import tensor_files
from fourfold_trainer.checkpoint.model_export import WeightsWriter
from fourfold_trainer.checkpoint.store import write_tensors
from fourfold_trainer.checkpoint.tensor_files import ModelFiles, read_shard

TENSORS = {
    "b": torch.arange(15.0).view(3, 5),
    "a\u00e9": torch.arange(7).bfloat16(),
    "bytes": torch.arange(5, dtype=torch.uint8),
    "scalar": torch.tensor(3.0),
    "empty": torch.zeros(0, 3),
}


@pytest.mark.parametrize("metadata", [None, {"format": "pt"}])
def test_a_file_is_byte_for_byte_that_of_safetensors(
    tmp_path: Path, metadata: dict[str, str] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_files, "_CHUNK_BYTES", 16)
    write_tensors(tmp_path / "ours", TENSORS, metadata=metadata)
    safetensors.torch.save_file(TENSORS, tmp_path / "theirs", metadata=metadata)
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()


@pytest.mark.parametrize("world", [1, 2, 3, 7, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_shards_of_all_ranks_are_the_parameter(
    tmp_path: Path, world: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_files, "_CHUNK_BYTES", 8)
    experts = {f"expert.{i}": torch.randn(3, 4).bfloat16() for i in range(3)}
    safetensors.torch.save_file(experts, tmp_path / "model.safetensors")
    slices = [ParameterSlice(name=name, start=12 * i, shape=(3, 4)) for i, name in enumerate(experts)]
    part = -(-36 // world)
    shards = [torch.empty(max(0, min(part, 36 - rank * part)), dtype=dtype) for rank in range(world)]
    with ModelFiles(tmp_path) as files:
        for rank, shard in enumerate(shards):
            read_shard(files, slices, rank * part, shard)
    assert torch.cat(shards).equal(torch.cat([one.reshape(-1) for one in experts.values()]).to(dtype))


def test_elements_outside_of_a_tensor_are_no_elements_of_the_next(tmp_path: Path) -> None:
    safetensors.torch.save_file({"a": torch.ones(4), "b": torch.ones(4)}, tmp_path / "model.safetensors")
    with ModelFiles(tmp_path) as files, pytest.raises(IndexError, match="has no elements 2 to 5"):
        files.read("a", 2, torch.empty(3))


def test_a_file_that_is_cut_is_refused_at_its_header_and_while_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    safetensors.torch.save_file({"a": torch.ones(400)}, path)
    with ModelFiles(tmp_path) as files:
        with path.open("r+b") as stream:
            stream.truncate(path.stat().st_size - 8)
        with pytest.raises(ConfigError, match=r"model\.safetensors ended at byte .* copy it again"):
            files.read("a", 0, torch.empty(400))
    with pytest.raises(ConfigError, match="not a safetensors file"):
        ModelFiles(tmp_path)


def test_weights_that_are_quantized_are_refused(tmp_path: Path) -> None:
    safetensors.torch.save_file({"a": torch.ones(4).to(torch.float8_e4m3fn)}, tmp_path / "model.safetensors")
    with ModelFiles(tmp_path) as files, pytest.raises(ConfigError, match="holds a as F8_E4M3; only"):
        files.read("a", 0, torch.empty(4))


def test_the_files_of_the_index_alone_are_read(tmp_path: Path) -> None:
    """Some folders hold the weights a second time."""
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-1.safetensors"}}')
    safetensors.torch.save_file({"a": torch.ones(4)}, tmp_path / "model-1.safetensors")
    safetensors.torch.save_file({"layers.a": torch.ones(4)}, tmp_path / "consolidated.safetensors")
    with ModelFiles(tmp_path) as files:
        assert list(files.entries) == ["a"]
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ConfigError, match="has no weight_map"):
        ModelFiles(tmp_path)


def test_a_large_model_is_several_files_with_an_index_that_transformers_reads(tmp_path: Path) -> None:
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
    )
    model: Any = transformers.LlamaForCausalLM(config)  # type: ignore[no-untyped-call]
    state = model.state_dict()
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    model.save_pretrained(theirs, max_shard_size=5000)
    ours.mkdir()
    writer = WeightsWriter(ours, {n: (t.dtype, tuple(t.shape)) for n, t in state.items()}, max_file_bytes=5000)
    for name in sorted(state):  # in any order
        writer.write(name, state[name])
    writer.finish()
    writer.close()
    names = sorted(path.name for path in ours.iterdir())
    assert len(names) > 3 and names == sorted(p.name for p in theirs.iterdir() if p.name.startswith("model"))
    assert all((ours / name).read_bytes() == (theirs / name).read_bytes() for name in names)
