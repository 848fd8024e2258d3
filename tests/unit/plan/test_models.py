"""Selection of the layers that get an adapter, and their part of `fourfold plan`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from fourfold import config as configuration
from fourfold.config import Config, LoraConfig
from fourfold.errors import ConfigError
from fourfold.model import folder as model_folder
from fourfold.plan import report
from fourfold.plan.memory import checkpoint_bytes, memory_plan
from fourfold.plan.models import adapter_plan, linear_shapes, model_sizes, select_adapter_layers
from fourfold.plan.weight_update import lora_update
from tests.support.tiny_models import write_tiny_model

QUICKSTART = Path(__file__).parents[3] / "recipes" / "quickstart.toml"
NAMES = ["layers.0.attn.q_proj", "layers.0.attn.v_proj", "layers.0.mlp.up_proj", "layers.1.attn.q_proj"]


def recipe(*, changes: dict[str, Any] | None = None, **lora: Any) -> Config:
    data = configuration.load(QUICKSTART).model_dump() | (changes or {})
    data["model"]["dtype"] = "bfloat16"  # the base model's; adapters have float32 masters beside it
    data["trainer"]["lora"] = lora
    return Config.model_validate(data)


def chosen(*targets: str) -> list[str]:
    return select_adapter_layers(NAMES, LoraConfig(rank=4, target_modules=targets))


def test_layers_are_selected_by_the_ends_of_their_names() -> None:
    assert chosen("all-linear") == NAMES
    assert chosen("q_proj") == [NAMES[0], NAMES[3]]
    assert chosen("0.attn.q_proj", "up_proj") == [NAMES[0], NAMES[2]]
    assert chosen("layers.1.attn.q_proj") == [NAMES[3]]


@pytest.mark.parametrize(
    ("target", "hint"),
    [
        ("q_porj", "did you mean 'q_proj'? Its"),
        ("proj", "did you mean"),
        ("attn", "'attn'. Its"),
        ("1.attn.v_proj", "'v_proj'?"),
    ],
)
def test_an_unknown_layer_is_refused(target: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        chosen("q_proj", target)
    message = caught.value.message
    assert message.startswith(f"trainer.lora.target_modules: the model has no linear layer {target!r}")
    assert message.endswith("linear layers are q_proj, up_proj, v_proj: give some of these, or 'all-linear'")
    assert hint in message


def test_the_linear_layers_of_a_folder_are_those_of_its_model(tmp_path: Path) -> None:
    for family in ("llama", "qwen2", "gpt_neox"):
        folder = write_tiny_model(tmp_path / family, family)
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder)
        wanted = {
            name: tuple(module.weight.shape)
            for name, module in model.named_modules()
            if isinstance(module, torch.nn.Linear) and module is not model.get_output_embeddings()
        }
        assert linear_shapes(str(folder)) == wanted


def test_the_built_in_model_has_the_tensors_that_its_size_says() -> None:
    source = "builtin:smollm2-135m-instruct"
    shapes = model_folder.tensor_shapes(source)
    count = sum(one[0] * (one[1] if len(one) > 1 else 1) for one in shapes.values())
    assert count == model_folder.shape(source).parameter_count


def test_the_plan_counts_the_trained_parameters() -> None:
    said = " ".join(report.describe(recipe(rank=16)).split())
    # A layer: q 576+576, k and v 192+576 each, o 576+576, gate, up and down 576+1536 each; times 16, times 30.
    assert 16 * 30 * (2 * 1152 + 2 * 768 + 3 * 2112) == 4_884_480
    assert (
        "adapters of rank 16 in 210 linear layers (down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj), "
        "scale 2: 4.88M parameters are trained, 3.63% of the model's"
    ) in said
    assert "checkpoints of about 0.1 GiB" in said
    assert "the others are frozen. Engines get the adapters: 9.8 MB per update. Exports hold the merged" in said
    assert "9.8 MB go to the engine" in said
    assert "lora" not in report.describe(recipe())
    assert adapter_plan(recipe()) is None


def test_the_plan_says_why_engines_get_merged_weights() -> None:
    merged = recipe(rank=16, changes={"weights": {"adapters": "merged"}})
    said = " ".join(report.describe(merged).split())
    assert 'Engines get merged weights, because weights.adapters = "merged": 269.0 MB per update. Exports' in said
    assert "0.25 GiB go to the engine" in said
    high = recipe(rank=513)
    assert "because vLLM takes adapters up to rank 512: 269.0 MB" in lora_update(high, model_sizes(high).policy)
    assert lora_update(recipe(), model_sizes(recipe()).policy) == ""


def test_the_plan_counts_masters_and_checkpoints_of_adapters_alone() -> None:
    config = recipe(rank=16, target_modules=["q_proj", "v_proj"])
    found = adapter_plan(config)
    assert found is not None
    assert (found.layers, found.kinds, found.parameter_count) == (60, ("q_proj", "v_proj"), 16 * 30 * (1152 + 768))
    sizes, trained = model_sizes(config), found.parameter_count
    assert checkpoint_bytes(config, sizes) == 12 * trained
    row, whole = (memory_plan(config, each)[0] for each in (sizes, replace(sizes, adapters=None)))
    assert (row.gradients, row.optimizer) == (4 * trained, 16 * trained)
    assert (row.weights, row.activations) == (whole.weights, whole.activations)


def test_a_recipe_with_adapters_of_no_rank_is_refused() -> None:
    with pytest.raises(ValueError, match=r"`target_modules` has no effect without adapters; set `rank` above 0"):
        LoraConfig(target_modules=("q_proj",))
    with pytest.raises(ValueError, match=r'has "all-linear" and other names; keep one'):
        LoraConfig(rank=4, target_modules=("q_proj", "all-linear"))
    with pytest.raises(ValueError, match="at least 1 item"):
        LoraConfig(rank=4, target_modules=())


def test_scales() -> None:
    assert LoraConfig(rank=16).scale == 2.0
    assert LoraConfig(rank=64).scale == 0.5
    assert LoraConfig(rank=64, use_rslora=True).scale == 4.0
    assert recipe(rank=2, target_modules="q_proj").trainer.lora.target_modules == ("q_proj",)


@pytest.mark.parametrize("family", ["llama", "llama_tied"])
def test_a_reward_model_and_a_critic_have_a_row_in_place_of_an_output_embedding(tmp_path: Path, family: str) -> None:
    folder = write_tiny_model(tmp_path, family)
    tables = {"name": "r", "steps": 1, "model": {"source": str(folder), "max_context_tokens": 64}}
    rows = {"data": {"train": {"path": "pairs.jsonl"}}, "batch": {"rows_per_step": 4}}
    scores = Config.model_validate({**tables, **rows, "algorithm": {"preset": "reward-model"}})
    sft = Config.model_validate({**tables, **rows, "algorithm": {"preset": "sft"}})
    shape, embedding = model_sizes(sft).policy, 0 if family == "llama_tied" else 512 * 64
    assert model_sizes(scores).policy.parameter_count == shape.parameter_count - embedding + 64
    engines = {"batch": {"prompts_per_step": 1, "group_size": 4}, "sampling": {"max_new_tokens": 8}}
    ppo = Config.model_validate({**tables, **rows, **engines, "algorithm": {"preset": "ppo"}})
    assert model_sizes(ppo).critic == model_sizes(scores).policy and model_sizes(ppo).policy == shape
    logits = memory_plan(sft, model_sizes(sft))[0].activations - memory_plan(scores, model_sizes(scores))[0].activations
    assert logits == 4096 * 512 * 4 * 3, "float32 logits with two copies"
    lora = scores.model_copy(update={"trainer": scores.trainer.model_copy(update={"lora": LoraConfig(rank=2)})})
    adapters = adapter_plan(lora)
    assert adapters is not None and model_sizes(lora).trained == adapters.parameter_count + 64
