"""The memory of large models on many GPUs, from their config.json and the headers of their files.

The expected numbers are computed by hand: P parameters, N ranks, bfloat16, ZeRO stage 3, AdamW, gradient checkpointing.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fourfold.config import Config
from fourfold.host.hardware import Gpu
from fourfold.model import folder as model_folder
from fourfold.plan import report
from fourfold.plan.memory import GIB, memory_plan
from fourfold.plan.models import model_sizes
from fourfold.plan.placement import memory_warnings, node_plan

# hidden, layers, heads, key and value heads, head size, inner size, vocabulary, experts
QWEN_7B = (3584, 28, 28, 4, 128, 18_944, 152_064, 0)
QWEN_32B = (5120, 64, 40, 8, 128, 27_648, 152_064, 0)
LLAMA_70B = (8192, 80, 64, 8, 128, 28_672, 128_256, 0)
QWEN_235B = (4096, 94, 64, 4, 128, 1536, 151_936, 128)  # 8 of 128 experts

# Parameters in 1e9: all, and those of the largest layer (in small models the embedding is larger).
COUNTS: dict[tuple[int, ...], tuple[float, float]] = {
    QWEN_7B: (7.615, 0.545),
    QWEN_32B: (32.763, 0.779),
    LLAMA_70B: (70.554, 1.051),
    QWEN_235B: (235.094, 2.488),
}


def write_headers(folder: Path, sizes: tuple[int, ...]) -> Path:
    """Write a folder with the configuration and a sparse file: the header, and a hole in the place of the weights."""
    hidden, layers, heads, keys, width, inner, vocabulary, experts = sizes
    config: dict[str, Any] = {
        "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": keys,
        "head_dim": width, "intermediate_size": 8 * inner if experts else inner, "vocab_size": vocabulary,
    }  # fmt: skip
    config |= {"num_experts": experts, "num_experts_per_tok": 8, "moe_intermediate_size": inner} if experts else {}
    block: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj": (heads * width, hidden), "self_attn.k_proj": (keys * width, hidden),
        "self_attn.v_proj": (keys * width, hidden), "self_attn.o_proj": (hidden, heads * width),
        "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,),
    }  # fmt: skip
    mlps = [f"mlp.experts.{i}" for i in range(experts)] or ["mlp"]
    for mlp in mlps:
        block |= {f"{mlp}.gate_proj": (inner, hidden), f"{mlp}.up_proj": (inner, hidden)}
        block |= {f"{mlp}.down_proj": (hidden, inner)}
    block |= {"mlp.gate": (experts, hidden)} if experts else {}
    shapes = {f"model.layers.{i}.{name}.weight": shape for i in range(layers) for name, shape in block.items()}
    shapes |= dict.fromkeys(("model.embed_tokens.weight", "lm_head.weight"), (vocabulary, hidden))
    shapes["model.norm.weight"] = (hidden,)
    header, end = {}, 0
    for name, shape in shapes.items():
        size = 2 * shape[0] * (shape[1] if len(shape) > 1 else 1)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end := end + size]}
    text = json.dumps(header).encode()
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    with (folder / "model.safetensors").open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        stream.truncate(8 + len(text) + end)
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, ...], Path]:
    root = tmp_path_factory.mktemp("models")
    return {sizes: write_headers(root / str(index), sizes) for index, sizes in enumerate(COUNTS)}


def recipe(folder: Path, ranks: int, **trainer: Any) -> Config:
    return Config.model_validate(
        {
            "name": "t",
            "steps": 1,
            "model": {"source": str(folder), "max_context_tokens": 4096, "dtype": "bfloat16"},
            "data": {"train": {"path": "t.jsonl"}},
            "sampling": {"max_new_tokens": 2048},
            "batch": {"prompts_per_step": 64, "group_size": 8, "tokens_per_micro_batch": 16_384},
            "trainer": {"device": "cuda", "ranks": ranks, "gradient_checkpointing": True, **trainer},
            "rollout": {"gpus_per_replica": 8},
            "placement": {"colocated": False},
        }
    )


@pytest.mark.parametrize("sizes", list(COUNTS))
def test_the_sizes_are_those_of_the_headers(sizes: tuple[int, ...], folders: dict[tuple[int, ...], Path]) -> None:
    shape = model_folder.shape(str(folders[sizes]))
    whole, block = COUNTS[sizes]
    assert shape.parameter_count / 1e9 == pytest.approx(whole, abs=1e-3)
    assert shape.largest_block / 1e9 == pytest.approx(block, abs=1e-3)
    assert shape.intermediate == sizes[5] * (8 if sizes[7] else 1)


# GB (1e9 bytes) of a rank on its GPU, and in main memory:
#   weights     2 P / N, and 2 bytes for each of the 1e9 parameters that are gathered, or of a larger layer
#   gradients   4 P / N
#   optimizer   12 P / N: master and two moments
#   host        12 P / N: what it reads of a checkpoint
@pytest.mark.parametrize(
    ("sizes", "ranks", "weights", "gradients", "optimizer", "host"),
    [
        (QWEN_7B, 2, 7.62 + 2.0, 15.23, 45.69, 45.69),
        (QWEN_7B, 8, 1.90 + 2.0, 3.81, 11.42, 11.42),
        (QWEN_32B, 8, 8.19 + 2.0, 16.38, 49.14, 49.14),
        (QWEN_32B, 32, 2.05 + 2.0, 4.10, 12.29, 12.29),
        (LLAMA_70B, 16, 8.82 + 2.10, 17.64, 52.92, 52.92),
        (LLAMA_70B, 64, 2.20 + 2.10, 4.41, 13.23, 13.23),
        (QWEN_235B, 64, 7.35 + 4.98, 14.69, 44.08, 44.08),
    ],
)  # fmt: skip
def test_a_rank_takes_its_part(
    sizes: tuple[int, ...], ranks: int, weights: float, gradients: float, optimizer: float, host: float,
    folders: dict[tuple[int, ...], Path],
) -> None:  # fmt: skip
    config = recipe(folders[sizes], ranks)
    rows = {row.role: row for row in memory_plan(config, model_sizes(config))}
    trainer = rows["trainer"]
    assert (trainer.count, trainer.on_gpu) == (ranks, True)
    found = [trainer.weights, trainer.gradients, trainer.optimizer, rows["trainer, host"].optimizer]
    assert [one / 1e9 for one in found] == pytest.approx([weights, gradients, optimizer, host], abs=0.02)
    assert trainer.activations >= 4 * model_sizes(config).policy.parameter_count // ranks, (
        "or a flat copy of the gradients"
    )
    assert rows["trainer, host"].weights == 0 and not rows["trainer, host"].on_gpu


def test_the_host_of_adapters_moves_the_base_and_restores_little(folders: dict[tuple[int, ...], Path]) -> None:
    config = recipe(folders[LLAMA_70B], 64, lora={"rank": 16})
    host = next(row for row in memory_plan(config, model_sizes(config)) if row.role == "trainer, host")
    assert host.weights / 1e9 == pytest.approx(2.20, abs=0.01) and host.optimizer == 0
    offloaded = recipe(folders[LLAMA_70B], 64, offload="optimizer")
    host = next(row for row in memory_plan(offloaded, model_sizes(offloaded)) if row.role == "trainer, host")
    assert host.weights == host.optimizer == 0, "it is restored in place"


def test_what_does_not_fit_is_a_warning_with_a_number_of_ranks(
    folders: dict[tuple[int, ...], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = recipe(folders[LLAMA_70B], 8)
    sizes = model_sizes(config)
    assert memory_warnings(config, sizes) == []
    (text,) = memory_warnings(config, sizes, gpu_bytes=80 * GIB)
    assert "A GPU must hold about 1" in text and "this machine's have 80.0: use at least 32 ranks." in text
    wide = recipe(folders[LLAMA_70B], 32)
    assert memory_warnings(wide, sizes, gpu_bytes=80 * GIB) == []
    (text,) = memory_warnings(wide, sizes, gpu_bytes=80 * GIB, host_bytes=256 * GIB)
    assert "of main memory, and this machine has 256.0 free: spread the ranks" in text
    (text,) = memory_warnings(recipe(folders[LLAMA_70B], 8), sizes, gpu_bytes=GIB)
    assert "raise rollout.gpus_per_replica, use trainer.offload, or lower" in text
    (text,) = memory_warnings(recipe(folders[QWEN_7B], 8, zero_stage=2), model_sizes(recipe(folders[QWEN_7B], 8)))
    assert text.startswith("Each rank holds all 14.2 GiB of weights, because trainer.zero_stage = 2")
    monkeypatch.setattr(report, "visible_gpus", lambda: [Gpu(id="0", name="g", memory_bytes=80 * GIB)])
    assert "warning     A GPU must hold about" in report.describe(config)


def test_the_plan_of_several_nodes_and_of_fewer_ranks(folders: dict[tuple[int, ...], Path]) -> None:
    waits = {"attach_seconds": 60.0, "min_ranks": 16}
    config = recipe(folders[LLAMA_70B], 32, **waits)
    config = Config.model_validate(config.model_dump() | {"placement": {"colocated": False, "trainer_nodes": 4}})
    sizes = model_sizes(config)
    divided, fewer = node_plan(config, sizes)
    assert "4 nodes hold 8 of the trainer's ranks each (0-7; 8-15; 16-23; 24-31)" in divided
    # 8 ranks with 12 P / N each and 700 MiB of programs
    needed = 8 * (12 * 70.554e9 / 32 / GIB + 700 / 1024)
    assert f"a node needs 8 GPUs and about {needed:.1f} GiB of main memory" in divided
    assert "it goes on with at least 16 of 32 ranks: the fullest GPU holds about 1" in fewer
    assert node_plan(recipe(folders[LLAMA_70B], 32), sizes) == []

    assert memory_warnings(config, sizes, gpu_count=8, gpu_bytes=140 * GIB, host_bytes=256 * GIB) == []
    found = memory_warnings(config, sizes, gpu_count=4, gpu_bytes=80 * GIB, host_bytes=128 * GIB)
    assert [text.partition(",")[0] for text in found] == [
        "A node must have 8 GPUs for its ranks",
        f"With trainer.min_ranks = 16 a GPU must hold about {fewer.split('about ')[1].split()[0]} GiB",
        f"The ranks of a node take about {needed:.1f} GiB of main memory",
    ]
