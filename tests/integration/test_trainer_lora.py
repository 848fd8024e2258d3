"""LoRA in real DeepSpeed engines on tiny models: what is learned, sent, exported and kept.

The truth is a plain PyTorch loop in float64 over a model whose adapters were put in by hand.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import safetensors.torch
import torch
import transformers
from torch import Tensor

from tests.integration.test_trainer_deepspeed import check
from tests.support.fork_server import run_cases
from tests.support.plain_lora import by_hand, fingerprint_of, plain_lora, read_pairs
from tests.support.plain_trainer import Arrays, lookup, plain
from tests.support.trainer_driver import Case

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(300)]
peft = pytest.importorskip("peft")

LORA: Final = {"rank": 4, "alpha": 24.0, "target_modules": ["all-linear"]}
SCALE: Final = 6.0
LAYERS: Final = 14  # of the tiny Llama: seven in each of two blocks
DECAY: Final = 0.6
TinyModel = Callable[..., Path]


def run(cases: Sequence[Case], folder: Path) -> dict[str, Arrays]:
    """Run cases in one process; return what each saw."""
    return run_cases(cases, folder, driver="tests.support.lora_driver")


def case(out: Path, base: Path, name: str, **more: Any) -> Case:
    """Return a case that saves in OUT/saved NAME, and whose engines get merged weights."""
    given = {"name": name, "model": str(base), "lora": LORA, "adapters": "merged", **more}
    return Case(**{"folder": str(out / f"saved {name}"), **given})


@pytest.fixture(scope="module")
def llama(tiny_model: TinyModel) -> Path:
    return tiny_model("llama", 0, "float32")


@pytest.fixture(scope="module")
def two(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Arrays]:
    """Two ranks at stage 3."""
    folder = tmp_path_factory.mktemp("two")
    return folder, run([case(folder, llama, "run", ranks=2, budget=64)], folder)["run"]


@pytest.fixture(scope="module")
def every_stage(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Arrays]]:
    """One rank at every stage with an average; with gradient checkpoints; in bfloat16; resumed from each other.

    At stages 0 and 3 engines get adapters.
    """
    folder = tmp_path_factory.mktemp("stages")
    sent = ["auto", "merged", "merged", "auto"]
    cases = [case(folder, llama, f"stage {n}", stage=n, budget=48, ema=DECAY, adapters=sent[n]) for n in range(4)]
    again: dict[str, Any] = {"budget": 48, "does": "resume"}
    for n in range(4):
        cases.append(case(folder, llama, f"resumed {n}", stage=n, source=cases[n].folder, adapters=sent[n], **again))
    cases.append(case(folder, llama, "of stage 3", stage=1, source=cases[3].folder, **again))
    cases.append(case(folder, llama, "of stage 1", stage=3, source=cases[1].folder, adapters="auto", **again))
    cases.append(case(folder, llama, "checkpointing", stage=3, budget=48, checkpointing=True))
    cases.append(case(folder, llama, "large", stage=3, lora={"rank": 1024, "alpha": 64.0}))
    cases += [case(folder, llama, f"bfloat16 {n}", stage=n, dtype="bfloat16") for n in (1, 2, 3)]
    return folder, run(cases, folder)


def truth(folder: Path, name: str, model: Path, *, ema: float = 0.0) -> Arrays:
    """Return what plain PyTorch learns that begins with the same adapters."""
    pairs = read_pairs(folder / f"{name} 0" / "adapter")
    assert len(pairs) == LAYERS and all(not b.any() and a.std() > 0.01 for a, b in pairs.values())
    return plain(model, model=plain_lora(model, pairs, scale=SCALE), ema=ema)


def check_learning(folder: Path, name: str, seen: Arrays, model: Path) -> None:
    """Losses, norms of gradients, updates; nothing is computed differently at first."""
    check(seen, truth(folder, name, model))
    np.testing.assert_allclose(seen["before"], plain(model)["before"], atol=2e-5)


def check_weights(folder: Path, name: str, moment: str, model: Path) -> None:
    """An engine gets what is exported, which is what PEFT merges; PEFT's folder gives the same log-probabilities.

    Or it gets the adapters in PEFT's folder, bit for bit.
    """
    exported, adapter = folder / f"{name} {moment}", folder / f"{name} {moment}" / "adapter"
    weights = safetensors.torch.load_file(exported / "model.safetensors")
    sent = safetensors.torch.load_file(folder / f"{name} {moment}.safetensors")
    start = safetensors.torch.load_file(model / "model.safetensors")
    assert set(weights) == set(start)
    pairs = read_pairs(adapter)
    if "model.layers.0.self_attn.q_proj.weight" not in sent:
        check_adapters(folder, f"{name} {moment}", adapter, model)
        sent = weights
    assert set(sent) == set(start)
    moved = {key for key in start if not torch.equal(start[key], weights[key])}
    assert moved == (set() if moment == "0" else {f"{layer}.weight" for layer in pairs})
    for key, wanted in by_hand(model, pairs, scale=SCALE).items():
        torch.testing.assert_close(weights[key].double(), wanted, rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(sent[key], weights[key], rtol=1e-6, atol=1e-7)
    base: Any = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    tuned: Any = peft.PeftModel.from_pretrained(base, adapter)
    plainly: Any = transformers.AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32)
    np.testing.assert_allclose(lookup(tuned), lookup(plainly), atol=2e-5)
    for key, value in tuned.merge_and_unload().state_dict().items():
        torch.testing.assert_close(weights[key], value, rtol=1e-6, atol=1e-7)


def check_adapters(folder: Path, name: str, wanted: Path, model: Path) -> None:
    """An engine got the tensors of PEFT's folder `wanted`, and was told what they are."""
    with safetensors.safe_open(folder / f"{name}.safetensors", framework="pt") as sent:
        tensors = safetensors.torch.load_file(wanted / "adapter_model.safetensors")
        assert set(sent.keys()) == set(tensors)
        assert all(torch.equal(sent.get_tensor(key), tensor) for key, tensor in tensors.items())
        assert json.loads(sent.metadata()["adapter"]) == {"rank": 4, "scale": SCALE, "base": fingerprint_of(model)}


def read(folder: Path, name: str) -> dict[str, Tensor]:
    return safetensors.torch.load_file(folder / f"{name}.safetensors")


def check_same(folder: Path, first: str, second: str) -> None:
    one, other = read(folder, first), read(folder, second)
    assert all(torch.equal(one[key], other[key]) for key in one)


# ---- two ranks -------------------------------------------------------------------------


def test_two_ranks_learn_what_plain_pytorch_learns(two: tuple[Path, Arrays], llama: Path) -> None:
    folder, seen = two
    check_learning(folder, "run", seen, llama)


@pytest.mark.parametrize("moment", ["0", "2", "3"])
def test_engines_and_exports_get_the_sum_from_two_ranks(two: tuple[Path, Arrays], llama: Path, moment: str) -> None:
    folder, seen = two
    check_weights(folder, "run", moment, llama)
    if moment != "2":
        plainly: Any = transformers.AutoModelForCausalLM.from_pretrained(folder / f"run {moment}")
        np.testing.assert_allclose(lookup(plainly), seen["before" if moment == "0" else "after"], atol=2e-4)


def test_engines_get_whole_adapters_from_two_ranks(llama: Path, tmp_path: Path) -> None:
    run([case(tmp_path, llama, "run", ranks=2, budget=64, adapters="auto")], tmp_path)
    for moment in ("0", "2", "3"):
        check_weights(tmp_path, "run", moment, llama)


def test_a_checkpoint_holds_the_adapters_alone(two: tuple[Path, Arrays], llama: Path) -> None:
    saved = two[0] / "saved run"
    names: dict[str, int] = {}
    for path in saved.glob("policy-*.safetensors"):
        for key, value in safetensors.torch.load_file(path).items():
            if key.startswith("master/"):
                name = key.split("/", 2)[2]
                names[name] = names.get(name, 0) + value.numel()
    assert len(names) == 2 * LAYERS and all(".lora_A." in name or ".lora_B." in name for name in names)
    model = safetensors.torch.load_file(llama / "model.safetensors")
    matrices = [w for n, w in model.items() if ".layers." in n and w.dim() == 2]
    assert sum(names.values()) == sum(4 * sum(w.shape) for w in matrices)


def test_two_ranks_go_on_bit_for_bit(two: tuple[Path, Arrays], llama: Path) -> None:
    folder, seen = two
    again = case(folder, llama, "again", ranks=2, budget=64, does="resume", source=str(folder / "saved run"))
    found = run([again], folder)["again"]
    np.testing.assert_array_equal(found["at 2"], seen["at 2"])
    np.testing.assert_array_equal(found["after"], seen["after"])
    check_same(folder, "run 2", "again 2")
    check_same(folder, "run 3", "again 3")


@pytest.mark.parametrize("stage", [0, pytest.param(1, marks=pytest.mark.soak), 2])
def test_a_pair_of_ranks_learns_the_same_at_the_other_stages(llama: Path, tmp_path: Path, stage: int) -> None:
    seen = run([case(tmp_path, llama, "pair", stage=stage, ranks=2, budget=64)], tmp_path)["pair"]
    check_learning(tmp_path, "pair", seen, llama)
    check_weights(tmp_path, "pair", "3", llama)


# ---- one rank, every stage ---------------------------------------------------------------


@pytest.mark.parametrize("name", ["stage 0", "stage 1", "stage 2", "stage 3", "checkpointing"])
def test_every_stage_learns_what_plain_pytorch_learns(
    every_stage: tuple[Path, dict[str, Arrays]], llama: Path, name: str
) -> None:
    folder, seen = every_stage
    check_learning(folder, name, seen[name], llama)
    for moment in ("0", "2", "3"):
        check_weights(folder, name, moment, llama)


@pytest.mark.parametrize("stage", range(4))
def test_every_stage_goes_on_bit_for_bit(every_stage: tuple[Path, dict[str, Arrays]], stage: int) -> None:
    folder, seen = every_stage
    np.testing.assert_array_equal(seen[f"resumed {stage}"]["at 2"], seen[f"stage {stage}"]["at 2"])
    np.testing.assert_array_equal(seen[f"resumed {stage}"]["after"], seen[f"stage {stage}"]["after"])
    check_same(folder, f"stage {stage} 2", f"resumed {stage} 2")
    check_same(folder, f"stage {stage} 3", f"resumed {stage} 3")


def test_adapters_above_deepspeeds_limit_stay_whole_too(every_stage: tuple[Path, dict[str, Arrays]]) -> None:
    folder, seen = every_stage  # the driver looks at their state before each send
    assert max(a.numel() for a, _ in read_pairs(folder / "large 0" / "adapter").values()) > 100_000
    assert np.abs(seen["large"]["after"] - seen["large"]["before"]).max() > 0.05


def test_another_stage_goes_on_and_sends_in_another_way(
    every_stage: tuple[Path, dict[str, Arrays]], llama: Path
) -> None:
    folder, seen = every_stage
    for before in (1, 3):
        np.testing.assert_allclose(seen[f"of stage {before}"]["after"], seen[f"stage {before}"]["after"], atol=2e-5)
    check_adapters(folder, "of stage 1 2", folder / "stage 1 2" / "adapter", llama)
    merged = safetensors.torch.load_file(folder / "stage 3 2" / "model.safetensors")
    for key, value in read(folder, "of stage 3 2").items():
        torch.testing.assert_close(value, merged[key], rtol=1e-6, atol=1e-7)


def test_the_base_has_one_fingerprint(every_stage: tuple[Path, dict[str, Arrays]], llama: Path) -> None:
    records = [json.loads(path.read_text()) for path in every_stage[0].glob("saved */policy-lora.json")]
    assert len(records) >= 9  # every stage, float32 and bfloat16
    assert {record["base_fingerprint"] for record in records} == {fingerprint_of(llama)}


@pytest.mark.parametrize("stage", range(4))
def test_the_average_of_the_adapters_is_exported(
    every_stage: tuple[Path, dict[str, Arrays]], llama: Path, stage: int
) -> None:
    folder, seen = every_stage
    name = f"stage {stage}"
    wanted = truth(folder, name, llama, ema=DECAY)["average"]
    exported: Any = transformers.AutoModelForCausalLM.from_pretrained(folder / f"{name} average")
    np.testing.assert_allclose(lookup(exported), wanted, atol=2e-4)
    assert np.abs(wanted - seen[name]["after"]).max() > 0.01
    base: Any = transformers.AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32)
    tuned: Any = peft.PeftModel.from_pretrained(base, folder / f"{name} average" / "adapter")
    np.testing.assert_allclose(lookup(tuned), wanted, atol=2e-4)
    np.testing.assert_array_equal(seen[name]["after average"], seen[name]["after"])  # all is back in its place


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_bfloat16_is_rounded_once(every_stage: tuple[Path, dict[str, Arrays]], llama: Path, stage: int) -> None:
    folder, seen = every_stage
    name = f"bfloat16 {stage}"
    sent, exported = read(folder, f"{name} 3"), safetensors.torch.load_file(folder / f"{name} 3" / "model.safetensors")
    pairs = read_pairs(folder / f"{name} 3" / "adapter")
    base = {n: w.bfloat16() for n, w in safetensors.torch.load_file(llama / "model.safetensors").items()}
    for key, value in exported.items():
        assert value.dtype == sent[key].dtype == torch.bfloat16
        assert torch.equal(value, sent[key])
        wanted = base[key].double()
        if (pair := pairs.get(key.removesuffix(".weight"))) is not None:
            wanted = wanted + SCALE * (pair[1].double() @ pair[0].double())
            assert not torch.equal(value, base[key])
        # Half a unit in the last place of 8 bits, and what float32 may add where that is a tie.
        assert ((value.double() - wanted).abs() <= wanted.abs() * 2**-8 * 1.001 + 1e-7).all()
    # What the engine samples from is what the trainer computes, up to rounding.
    engine: Any = transformers.AutoModelForCausalLM.from_pretrained(folder / f"{name} 3", dtype=torch.bfloat16)
    assert np.abs(lookup(engine) - seen[name]["after"]).mean() < 0.05


# ---- what is refused ---------------------------------------------------------------------


def test_a_checkpoint_of_something_else_is_refused(llama: Path, tiny_model: TinyModel, tmp_path: Path) -> None:
    makers: dict[str, dict[str, Any]] = {
        "full": {},
        "rank": {**LORA, "rank": 8, "alpha": 48.0},
        "scale": {**LORA, "alpha": 4.0},
        "layers": {**LORA, "target_modules": ["q_proj", "v_proj"]},
        "base": LORA,
    }
    models = {"base": tiny_model("llama", 1, "float32")}
    (tmp_path / "refused.json").write_text("[]")
    made = [
        case(tmp_path, models.get(name, llama), name, stage=0, does="refuse", lora=lora)
        for name, lora in makers.items()
    ]
    run(made, tmp_path)
    (tmp_path / "refused.json").write_text(json.dumps([str(tmp_path / f"saved {name}") for name in makers]))
    cases = [
        case(tmp_path, llama, "mine", stage=0, does="refuse", folder=""),
        case(tmp_path, llama, "mine full", stage=0, does="refuse", folder="", lora={}),
    ]
    run(cases, tmp_path)
    full, rank, scale, layers, base = (tmp_path / "mine.txt").read_text().splitlines()
    assert "was written with trainer.lora.rank = 0, the trainer runs with trainer.lora.rank = 4" in full
    assert "was written with trainer.lora.rank = 8, the trainer runs with trainer.lora.rank = 4" in rank
    assert "was written with a scale of 1 (from trainer.lora.alpha), the trainer runs with a scale of 6" in scale
    assert "was written with adapters in 4 layers (q_proj, v_proj), the trainer runs with adapters in 14" in layers
    assert "was written on top of the base weights" in base
    said = (tmp_path / "mine full.txt").read_text().splitlines()
    assert said[0] == "nothing"  # its own kind
    assert all("with trainer.lora.rank = 0;" in line for line in said[1:])
