"""Models are built from headers and read in parts: the weights of transformers, and no element more."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers
from torch import Tensor, nn

from fourfold.config import Config
from fourfold.errors import ConfigError
from fourfold_trainer.checkpoint.tensor_files import ModelFiles
from fourfold_trainer.zero.load_model import build_from_headers, load_model, read_weights
from fourfold_trainer.zero.partition import Fill
from tests.support.recipes import make_recipe
from tests.support.tiny_models import write_tiny_model

FAMILIES = ["llama", "qwen2", "gemma3", "phi3", "gpt_neox", "mixtral", "qwen3_moe", "qwen2_moe"]
CPU = torch.device("cpu")


def recipe(folder: Path, *, dtype: str = "float32", seed: int = 0) -> Config:
    model = {"source": str(folder), "max_context_tokens": 64, "dtype": dtype}
    return make_recipe(seed=seed, model=model, trainer={"device": "cpu", "zero_stage": 1})


class RankPlacement:
    """Keeps the part of one rank of many, as ZeRO-3 does; the parameters themselves are empty."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world = rank, world
        self.parts: dict[int, Tensor] = {}

    def place(self, shape: tuple[int, ...], dtype: torch.dtype, fill: Fill) -> nn.Parameter:
        count = torch.Size(shape).numel()
        size = -(-count // self.world)
        part = torch.empty(max(0, min(size, count - self.rank * size)), dtype=dtype)
        if len(part):
            fill(part, self.rank * size)
        parameter = nn.Parameter(torch.empty(0, dtype=dtype))
        self.parts[id(parameter)] = part
        return parameter


def parts_of(folder: Path, rank: int, world: int, config: Config | None = None) -> dict[str, Tensor]:
    """Return one rank's part of each parameter, by name."""
    placement = RankPlacement(rank, world)
    with ModelFiles(folder) as files:
        model = build_from_headers(config or recipe(folder), files)
        read_weights(model, files, placement)
    return {name: placement.parts[id(parameter)] for name, parameter in model.named_parameters()}


def theirs(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True)


def change(folder: Path, edit: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> Path:
    """Replace the tensors in a folder."""
    path = folder / "model.safetensors"
    tensors = safetensors.torch.load_file(path)
    safetensors.torch.save_file({n: t.clone() for n, t in edit(tensors).items()}, path, metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("family", FAMILIES)
def test_the_parts_of_all_ranks_are_the_model_of_transformers(family: str, tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "m", family)
    ranks = [parts_of(folder, rank, 3) for rank in range(3)]
    model = theirs(folder)
    wanted = dict(model.named_parameters())
    assert list(ranks[0]) == list(wanted)
    for name, parameter in wanted.items():
        assert torch.cat([parts[name] for parts in ranks]).equal(parameter.detach().view(-1)), name


def test_a_whole_model_is_that_of_transformers_with_its_buffers_and_settings(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "m", "gemma3")
    ours, wanted = load_model(recipe(folder, dtype="bfloat16"), folder, CPU), theirs(folder, torch.bfloat16)
    assert ours.training and all(p.requires_grad for p in ours.parameters())
    for mine, other in (
        (ours.named_parameters(), wanted.named_parameters()),
        (ours.named_buffers(), wanted.named_buffers()),
    ):
        found = dict(mine)
        for name, tensor in other:
            assert found[name].equal(tensor) and found[name].dtype == tensor.dtype, name
    assert ours.get_output_embeddings().weight is ours.get_input_embeddings().weight
    assert ours.generation_config.to_dict() == wanted.generation_config.to_dict()


def test_a_head_that_the_files_lack_is_the_same_on_every_rank_and_number_of_ranks(tmp_path: Path) -> None:
    folder = change(write_tiny_model(tmp_path / "m", "llama"), lambda t: {n: t[n] for n in t if "lm_head" not in n})
    heads = []
    for world in (1, 2, 3):
        torch.manual_seed(world)  # ranks have random states of their own
        state = torch.get_rng_state()
        heads.append(torch.cat([parts_of(folder, rank, world)["lm_head.weight"] for rank in range(world)]))
        assert torch.get_rng_state().equal(state)
    assert heads[0].std() > 0.01
    assert heads[0].equal(heads[1]) and heads[0].equal(heads[2])
    other = parts_of(folder, 0, 1, recipe(folder, seed=1))["lm_head.weight"]
    assert not other.equal(heads[0])


@pytest.mark.parametrize("same", [True, False])
def test_tied_weights_that_the_files_hold_twice_are_tied_if_they_are_equal(same: bool, tmp_path: Path) -> None:
    def repeat(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        head = tensors["model.embed_tokens.weight"].clone()
        head[-1, -1] += 0 if same else 1
        return tensors | {"lm_head.weight": head}

    folder = change(write_tiny_model(tmp_path / "m", "llama_tied"), repeat)
    model = load_model(recipe(folder), folder, CPU)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == same
    assert model.lm_head.weight.equal(theirs(folder).lm_head.weight)


def test_a_body_without_its_prefix_is_found(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "m", "llama")
    wanted = theirs(folder)
    change(folder, lambda tensors: {name.removeprefix("model."): t for name, t in tensors.items()})
    ours = dict(load_model(recipe(folder), folder, CPU).named_parameters())
    assert all(ours[name].equal(parameter) for name, parameter in wanted.named_parameters())


def test_what_cannot_be_loaded_is_refused_with_the_reason(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "m", "llama")
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"has an adapter .*; give a folder with plain, merged weights"):
        load_model(recipe(folder), folder, CPU)
    (folder / "adapter_config.json").unlink()
    change(folder, lambda tensors: {n: t[:, :-1] if "embed" in n else t for n, t in tensors.items()})
    with pytest.raises(ConfigError, match="cannot be loaded as a causal language model"):
        load_model(recipe(folder), folder, CPU)
