"""The text of `fourfold plan`."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from fourfold import config as configuration
from fourfold.cli.main import main
from fourfold.config import Config
from fourfold.errors import ConfigError
from fourfold.host.hardware import Gpu
from fourfold.model import folder, runs
from fourfold.plan import placement, report
from fourfold.plan.chain import run_sources
from fourfold.plan.memory import memory_plan
from fourfold.plan.models import model_sizes
from fourfold.plan.placement import check_gpu_memory
from tests.unit.plan.test_large_models import QWEN_7B, write_headers

RECIPES = Path(__file__).parents[3] / "recipes"
QUICKSTART = RECIPES / "quickstart.toml"

# Word for word what the command prints: the README quotes it.
READ = (
    "read: 1,930 training prompts of 43 tokens. The run draws 96 prompts: 4.97% of them.",
    "read: 18 prompts in 9 task groups.",
    "last_number: the reference answers of 4 rows score 1, 1, 1, 1.",
)
QUICKSTART_PLAN = """\
quickstart: 8 steps of grpo on builtin:smollm2-135m-instruct

model       134.5M parameters: 30 layers of 576, 9 heads (3 for keys and values), vocabulary 49,152, tied
            embeddings. Trained in float32.
data        4,096 rows made by reasoning-gym `products` (min_terms 2, max_terms 2, min_digits 1, max_digits 1,
            seed 0), as chat; system prompt "Reply with only the final answer."
held out    9 groups of rows, drawn with seed 17 and never trained on; rows with the same numbers in
            `expression`, in any order, form one group. 8 sampled answers to each of their distinct prompts
            before step 1 and after steps 4, 8.
one step    12 prompts x 8 samples = 96 trajectories of at most 128 tokens, 16 of them sampled: at most 12,288
            tokens, 1,536 to train on, in one optimizer step.
algorithm   p is the log-probability of a sampled token now, o before the step; ratio = exp(p - o).
            reward: r = score.
            advantage: A = (r - mean(r)) / (std(r) + 1e-06), mean and std over the samples of a prompt; 0 when
            all scored the same; the same for each token of a sample.
            loss of a token: l = -min(ratio A, clip(ratio, 0.8, 1.2) A).
            loss: l summed over all sampled tokens / their number: every token weighs the same (token-mean).
            updates: 1 a step, in which p = o, so that no clip binds.
the run     8 steps = 768 trajectories. 2 checkpoints of about 1.5 GiB; the newest 2 stay in
            runs/quickstart/checkpoints.
trainer     1 rank on CPU, ZeRO stage 3. The 96 trajectories are packed into micro-batches of at most 2,048
            tokens: 16 of full length, so at most 6 passes. The packing does not change the result.
optimizer   AdamW with betas 0.9 and 0.999; learning rate 1e-05, constant; gradients clipped to a norm of 1.
rollout     1 service on CPU: 1 GiB of KV cache = 23,301 tokens = 182 samples of full length. Each engine runs
            at most 256 samples at once and processes at most 8,192 tokens per engine step.
reward      1 service, 1 worker process: `last_number`, at most 10 s per sample.
reference   none, because algorithm.kl.coef is 0.
weights     0.50 GiB go to the engine after every step, through shared memory, or by gloo to engines on other
            machines or in other containers.
            Running samples finish first. Checksums of all tensors are compared with the trainer's in the
            first 3 updates and every 10 versions, the log-probabilities of a probe prompt after every update.
            Direct, because all engines read the one copy in shared memory, which takes the trainer about 0.11
            s. Engines on other hosts are a chain: 0.51 s at 10 Gbit/s and 0.12 s at 100 Gbit/s.
policy lag  0: the weights of each step sample the next one.

GiB each     number  weights  gradients  optimizer  activations  kv cache  programs  total
trainer           1     1.00       0.50       1.50         2.69         -      0.68   6.38
rollout           1     0.50          -          -         0.34      1.00      1.27   3.11
transfer          1     0.50          -          -            -         -         -   0.50
reward            1        -          -          -            -         -      0.12   0.12
coordinator       1        -          -          -            -         -      0.23   0.23
Main memory in total: about 10.3 GiB.
"""


def without_speed(text: str) -> str:
    """Leave out the guess of the speed, which depends on the machine."""
    return re.sub(r"^speed .*?\n(?=\n)", "", text, flags=re.DOTALL | re.MULTILINE)


def in_bfloat16() -> dict[str, Any]:
    """Return the quickstart's tables in bfloat16, which needs float32 masters."""
    data = configuration.load(QUICKSTART).model_dump()
    data["model"]["dtype"] = "bfloat16"
    return data


def changed(**tables: dict[str, Any]) -> str:
    """Return the plan with some keys changed, as one line."""
    data = in_bfloat16()
    for name, table in tables.items():
        keep = {} if "preset" in table else data[name]  # every key is written out, and would win over the preset's
        data[name] = {**keep, **table}
    return " ".join(report.describe(Config.model_validate(data)).split())


def test_plan_of_the_quickstart_word_for_word(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(QUICKSTART)]) == 0
    lines = without_speed(capsys.readouterr().out).splitlines(keepends=True)
    assert [line.strip() for line in lines if line.strip() in READ] == list(READ)
    assert "".join(line for line in lines if line.strip() not in READ) == QUICKSTART_PLAN


def test_skipped_checks_read_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(QUICKSTART), "--skip-checks"]) == 0
    assert without_speed(capsys.readouterr().out) == QUICKSTART_PLAN


@pytest.mark.parametrize("path", sorted(RECIPES.glob("**/*.toml")), ids=lambda path: path.stem)
def test_every_recipe_has_a_plan(path: Path, tmp_path: Path) -> None:
    config = configuration.load(path)
    if not config.model.source.startswith(("builtin:", runs.PREFIX)):
        folder = write_headers(tmp_path / "model", QWEN_7B)
        teacher = [f"reference.source={folder}"] if config.reference.source else []
        config = configuration.load(path, [f"model.source={folder}", *teacher])
    with runs.expect_runs() as expect:  # those that the recipes before it make
        for key, source in run_sources(config).items():
            made = runs.ExpectedRun(source="builtin:smollm2-135m-instruct", steps=0, export_every_steps=0)
            expect(runs.parse(source, key)[0], made)
        text = report.describe(config)
    steps = f"{config.steps} steps" if config.steps else "1 pass"  # a check of the data counts its steps
    assert text.startswith(f"{config.name}: {steps} of")
    assert "Warning:" not in text


def test_plan_needs_no_converted_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert not folder.is_ready("builtin:smollm2-135m-instruct")
    assert without_speed(report.describe(configuration.load(QUICKSTART))) == QUICKSTART_PLAN
    assert list(tmp_path.iterdir()) == []


def test_missing_model_is_one_clear_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = tmp_path / "r.toml"
    recipe.write_text(QUICKSTART.read_text().replace("builtin:smollm2-135m-instruct", "no/such/folder"))
    assert main(["plan", str(recipe)]) == 1
    assert "model.source = 'no/such/folder': no such folder" in capsys.readouterr().err


def test_missing_certificates_are_the_error_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = [str(QUICKSTART), "--set", 'security.directory="certs"']
    assert main(["plan", *words]) == main(["run", *words]) == 1
    planned, run = capsys.readouterr().err.splitlines()
    assert planned == run and planned.startswith("fourfold: certs/ca.pem: cannot read it (No such file or directory); ")
    assert main(["plan", *words, "--skip-checks"]) == 0


def test_resolved_recipe_reads_back_to_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(QUICKSTART), "--resolved"]) == 0
    (tmp_path / "resolved.toml").write_text(capsys.readouterr().out)
    assert configuration.load(tmp_path / "resolved.toml") == configuration.load(QUICKSTART)


def test_plan_of_gpus_and_ranks() -> None:
    text = changed(trainer={"ranks": 8, "device": "cuda"}, rollout={"replicas": 2, "gpus_per_replica": 1})
    assert "8 ranks on GPU, ZeRO stage 3. The 96 trajectories, 12 per rank, are packed into micro-batches" in text
    assert "Trained in bfloat16 with float32 masters." in text
    assert "2 services on 1 GPU each: 85% of each GPU's memory, for weights and KV cache" in text
    assert "0.25 GiB go to each of 2 engines after every step" in text
    assert "trainer, per GPU 8" in text and "rollout, per GPU 2" in text and "85% of GPU" in text


def test_plan_of_pools() -> None:
    pools = [
        {"name": "big", "gpu": "H100", "gpus_per_replica": 4, "pipeline_parallel_size": 2, "kv_cache_gib": 8},
        {"name": "small", "dtype": "float32", "max_concurrent_samples": 8, "replicas": 2},
    ]
    data = in_bfloat16()
    data["rollout"] = {"pool": pools}
    text = " ".join(report.describe(Config.model_validate(data)).split())
    assert "rollout big: 1 service on 4 H100 each, in 2 stages: 8 GiB of KV cache on each" in text
    assert "small: 2 services on CPU: 1 GiB of KV cache = 23,301 tokens" in text
    assert "Each engine runs at most 8 samples at once" in text
    assert "Weights are converted to float32 as they arrive." in text
    assert "rollout-big, per GPU 4 0.06" in text and "rollout-small 2 0.50" in text, "the weights of each"
    assert "go to each of 3 engines after every step" in text


_SHARED: dict[str, dict[str, Any]] = {
    "trainer": {"ranks": 2, "device": "cuda"},
    "rollout": {"replicas": 2, "gpus_per_replica": 1, "kv_cache_gib": 8, "sleep_mode": True},
    "algorithm": {"preset": "grpo", "kl": {"coef": 0.1}},
    "reference": {"device": "cuda", "tokens_per_batch": 8192},
}


@pytest.mark.parametrize(
    ("backend", "says"),
    [
        ("gloo", "Chain: the trainer sends each shard once, to the first engine, and each engine passes it on"),
        ("shm", "Direct, because all engines read the one copy in shared memory"),
    ],
)
def test_plan_names_the_path_of_the_weights_and_its_cost(backend: str, says: str) -> None:
    text = " ".join(changed(weights={"backend": backend}, rollout={"replicas": 16}).split())
    assert says in text
    assert " s at 10 Gbit/s and " in text


def test_plan_lists_the_services_on_each_gpu() -> None:
    shared = changed(**_SHARED, placement={"colocated": True})
    assert "placement 2 GPUs, shared: GPU 0: rollout-0, trainer-0, reference-0; GPU 1: rollout-1, trainer-0." in shared
    assert "with the engine asleep" in shared
    unset = changed(**_SHARED)
    assert "placement 5 GPUs, one service on each: GPU 0: rollout-0; GPU 1: rollout-1; GPU 2: trainer-0; GPU" in unset
    assert "On a machine with fewer GPUs they share." in unset
    assert "fewer GPUs" not in changed(**_SHARED, placement={"colocated": False})
    assert "placement" not in changed()


def test_plan_says_how_many_of_the_gpus_this_machine_has(monkeypatch: pytest.MonkeyPatch) -> None:
    for have, says in ((0, "This machine has none."), (4, "This machine has 4."), (5, "")):
        gpus = [Gpu(id=str(number), name="", memory_bytes=80 << 30) for number in range(have)]
        monkeypatch.setattr(report, "visible_gpus", lambda found=gpus: found)
        for changes in ({}, {"placement": {"colocated": False}}):
            text = changed(**_SHARED, **changes)
            assert says in text and ("This machine has" in text) == bool(says)


def test_what_shares_a_gpu_must_fit_on_it_in_each_phase() -> None:
    data = in_bfloat16() | {"placement": {"colocated": True}}
    for name, table in _SHARED.items():
        data[name] = table if name == "algorithm" else {**data[name], **table}
    asleep = Config.model_validate(data)
    gib = 1 << 30
    # 8 of KV cache, 0.25 of each copy of the weights, and of the trainer's rank 0.13 + 0.25 + 0.75
    check_gpu_memory(asleep, round(10.0 * gib))
    with pytest.raises(ConfigError, match=r"while sampling a GPU must hold at least 9\.6 GiB .* and has 9\.0"):
        check_gpu_memory(asleep, 9 * gib)
    data["rollout"] |= {"kv_cache_gib": 1}
    check_gpu_memory(Config.model_validate(data), 4 * gib)
    data["trainer"] |= {"ranks": 1, "zero_stage": 1}
    data["rollout"] |= {"replicas": 1, "sleep_mode": False}
    with pytest.raises(ConfigError, match=r"set rollout.sleep_mode = true, or set placement.colocated = false"):
        check_gpu_memory(Config.model_validate(data), 3 * gib)


def test_a_reward_model_on_shared_gpus_counts_on_each_of_them(tmp_path: Path) -> None:
    model = {"source": str(write_classifier(tmp_path / "rm")), "device": "cuda", "tokens_per_batch": 1 << 20}
    data = in_bfloat16() | {"placement": {"colocated": True}, "reward": {"model": model}}
    for name, table in _SHARED.items():
        data[name] = table if name == "algorithm" else {**data[name], **table}
    with_model = Config.model_validate(data)
    without = with_model.model_copy(update={"reward": []})
    rows = memory_plan(with_model, model_sizes(with_model))
    (row,) = [row for row in rows if row.role == "reward model reward"]
    gpus = [placement._bytes_by_gpu(config, rows) for config in (with_model, without)]
    assert [(a[0] - b[0], a[1] - b[1]) for a, b in zip(*gpus, strict=True)] == [(row.total, row.total), (0, 0)]
    assert "2 GPUs, shared: GPU 0: rollout-0, trainer-0, reference-0, reward-0;" in report.describe(with_model)


def test_plan_of_ranks_that_share_micro_batches() -> None:
    text = changed(trainer={"ranks": 6, "sequence_parallel_size": 3})
    assert "The 96 trajectories, 48 per group of 3 ranks, are packed into micro-batches of at most 2,048" in text
    assert "The 3 ranks of a group share every micro-batch (sequence parallelism): each holds at most 683" in text
    assert "sequence parallelism" not in changed(trainer={"ranks": 6})
    with pytest.raises(ConfigError, match="sequence_parallel_size = 2 does not divide the 9 attention heads of model"):
        changed(trainer={"ranks": 6, "sequence_parallel_size": 2})


def test_plan_names_services_started_by_hand_and_the_reference() -> None:
    text = changed(rollout={"replicas": 0}, algorithm={"kl": {"coef": 0.01}})
    assert "rollout started by hand on CPU" in text
    assert "reference 1 service on CPU, with the frozen weights of builtin:smollm2-135m-instruct." in text


def test_plan_of_files() -> None:
    data = {"train": {"path": "train.jsonl"}, "holdout": None, "eval": {"path": "test.parquet", "size": 100}}
    text = changed(data=data, evaluation={"samples_per_prompt": 1, "max_prompts": 50})
    assert "data all rows of train.jsonl, as chat" in text
    assert "the first 100 rows of test.parquet. 1 sampled answer to the first 50 of their prompts before step 1" in text
    whole = changed(data={"holdout": {"field": "", "groups": 2, "unordered_numbers": False}})
    assert "never trained on; rows with the same prompt form one group." in whole
    numbers = changed(data={"holdout": {"field": "", "groups": 2, "unordered_numbers": True}})
    assert "rows with the same numbers in the prompt, in any order, form one group." in numbers
    assert "held out nothing, so no accuracy is measured" in changed(data={"holdout": None})


def test_plan_describes_the_updates_of_a_batch() -> None:
    four = changed(batch={"mini_batches_per_step": 4})
    assert "1,536 to train on, in 4 optimizer steps of 24 samples." in four
    assert "16 of full length, so at most 8 passes" in four
    twice = changed(batch={"mini_batches_per_step": 5, "epochs_per_step": 2})
    assert "in 10 optimizer steps of at most 20 samples, 2 times over all of them." in twice
    one = changed(batch={"prompts_per_step": 1, "group_size": 1}, algorithm={"preset": "reinforce++"})
    assert "one step 1 prompt x 1 sample = 1 trajectories" in one


def test_plan_describes_checkpoints_and_the_average() -> None:
    best = changed(checkpoint={"keep": 1, "keep_best": 3})
    assert "the newest 1 and the 3 with the best held-out score stay in runs/quickstart/checkpoints." in best
    average = changed(trainer={"ema_decay": 0.992})
    assert (
        "A moving average of the weights (decay 0.992 per optimizer step) is exported as runs/quickstart/model-ema"
        in average
    )
    assert "2 checkpoints of about 2.0 GiB" in average and "trainer 1 0.50 0.50 2.51" in average


def test_plan_describes_a_second_partition_of_the_weights() -> None:
    flat, second = (changed(trainer={"ranks": 4, "zero_hpz_partition_size": size}) for size in (1, 2))
    assert "Groups of 2 ranks keep a second copy of the weights" in second and "was not measured" in second
    assert "second copy" not in flat
    rows = [re.search(r"trainer 4 ([\d.]+)", text) for text in (flat, second)]
    weights = [float(row[1]) for row in rows if row is not None]
    assert weights[1] - weights[0] == pytest.approx(0.125, abs=0.01), "half of 135 million weights"


def test_plan_describes_optimizers_and_learning_rates() -> None:
    table = {"optimizer": "muon", "schedule": "cosine", "warmup_steps": 3, "final_learning_rate_share": 0.1}
    text = changed(trainer={**table, "weight_decay": 0.1}, algorithm={"preset": "ppo"}, critic={"warmup_steps": 1})
    assert (
        "optimizer Muon with momentum 0.95 for the layers' matrices, AdamW with betas 0.9 and 0.999 for the rest; "
        "learning rate 1e-05, reached after 3 steps, cosine decay to 0.1 of it after step 8; weight decay "
        "0.1, gradients clipped to a norm of 1. critic: the same; learning rate 9e-06, reached after 1 step, constant "
        "from then on; gradients clipped to a norm of 1." in text
    )


def test_plan_describes_offloading() -> None:
    for offload, device, sentence in (
        ("optimizer", "cuda", "norm of 1. Masters and moments stay in main memory, and the CPU updates them. rollout"),
        (
            "optimizer+parameters",
            "cuda",
            "the CPU updates them. The weights of each layer are copied to the GPU for its passes.",
        ),
        ("optimizer", "cpu", "On CPU this saves no memory and costs time."),
    ):
        text = changed(trainer={"offload": offload, "device": device})
        assert sentence in text
        assert "trainer, offloaded 1 " in text


def test_plan_counts_the_critic() -> None:
    plain, text = changed(), changed(algorithm={"preset": "ppo"})
    assert "quickstart: 8 steps of ppo on" in text
    assert "1 rank on CPU for policy and critic, ZeRO stage 3." in text
    assert "checkpoints of about 1.5 GiB" in plain and "checkpoints of about 3.0 GiB" in text
    assert "critic 1 0.50 0.50 2.00 - - - 3.01 rollout" in text and "critic" not in plain
    apart = changed(algorithm={"preset": "ppo"}, critic={"ranks": 2})
    assert "1 rank on CPU for the policy, and 2 ranks for the critic at the same time, ZeRO" in apart
    assert "critic 2 0.38 0.25 1.00" in apart
    assert changed(critic={"ranks": 2}) == plain
    with pytest.raises(ConfigError, match="no such folder"):
        changed(algorithm={"preset": "ppo"}, critic={"source": "no/such/folder"})
    assert changed(critic={"source": "no/such/folder"}) == plain, "the recipe has no critic"


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"backend": "gloo"}, "after every step, by gloo. Running samples finish first."),
        (
            {"pause": "keep"},
            "Running samples are paused, and continue under the new weights with the KV cache of the old",
        ),
        ({"pause": "recompute"}, "and continue under the new weights, which compute their KV cache again."),
        ({"pause": "abort"}, "leave their engine with their tokens, and continue from these as new requests."),
        ({"verify_every": 1}, "Checksums of all tensors are compared with the trainer's, and the log-probabilities of"),
        ({"verify_first": 0, "verify_every": 7}, "compared with the trainer's every 7 versions, the log-probabilities"),
    ],
)
def test_plan_describes_the_weight_update(keys: dict[str, Any], sentence: str) -> None:
    assert sentence in changed(weights=keys)


@pytest.mark.parametrize(
    ("backend", "sentence", "copied"),
    [
        (
            "auto",
            "memory (CUDA IPC) if they can access it, else by NCCL, or through main memory if neither works.",
            False,
        ),
        ("cuda_ipc", "read by the engine's GPUs from the trainer's memory (CUDA IPC).", False),
        ("nccl", "from GPU to GPU by NCCL.", False),
        ("shm", "through shared memory.", True),
    ],
)
def test_between_gpus_weights_take_no_main_memory(backend: str, sentence: str, copied: bool) -> None:
    text = changed(weights={"backend": backend}, trainer={"device": "cuda"}, rollout={"gpus_per_replica": 1})
    assert sentence in text
    assert ("transfer 1" in text) == copied


def test_weights_that_are_offloaded_go_through_main_memory() -> None:
    text = changed(trainer={"device": "cuda", "offload": "optimizer+parameters"}, rollout={"gpus_per_replica": 1})
    assert "after every step, through shared memory, or by gloo" in text and "transfer 1" in text


def test_plan_describes_the_memory_of_an_engine() -> None:
    text = changed(rollout={"gpus_per_replica": 1, "quantization": "fp8", "sleep_mode": True})
    assert "Weights are rounded to fp8 as they arrive. It sleeps while the trainer trains." in text


def test_plan_lists_the_limits_of_an_engine() -> None:
    gpus = {"gpus_per_replica": 1, "replicas": 2}
    text = changed(rollout=gpus, batch={"prompts_per_step": 200}, data={"holdout": None})
    assert "Each engine runs at most 800 samples at once and processes at most 16,384 tokens per engine step." in text
    given = changed(rollout={"max_concurrent_samples": 40, "vllm": {"block_size": 64, "kv_cache_dtype": "fp8"}})
    assert "Each engine runs at most 40 samples at once and processes at most 8,192 tokens" in given
    assert "per engine step. vLLM's own options: block_size = 64, kv_cache_dtype = fp8. reward" in given


def write_classifier(place: Path) -> Path:
    """Write the folder of a reward model of two layers; its weights are zeros."""
    shapes = {"model.embed_tokens.weight": [512, 64], "score.weight": [1, 64]}
    end, header = 0, dict[str, Any]()
    for name, shape in shapes.items():
        size = 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    config = {
        "architectures": ["LlamaForSequenceClassification"],
        "hidden_size": 64,
        "num_attention_heads": 2,
        "num_hidden_layers": 2,
        "intermediate_size": 128,
        "vocab_size": 512,
        "max_position_embeddings": 2048,
    }
    place.mkdir()
    (place / "config.json").write_text(json.dumps(config))
    (place / "tokenizer.json").write_text("{}")
    (place / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(end))
    return place


def with_rewards(tables: list[dict[str, Any]]) -> Config:
    return Config.model_validate({**in_bfloat16(), "reward": tables})


def test_the_plan_has_the_memory_of_reward_models(tmp_path: Path) -> None:
    source = str(write_classifier(tmp_path / "rm"))
    config = with_rewards([{"name": "rm", "model": source, "replicas": 2}])
    assert "reward 2 services on CPU: the reward model" in " ".join(report.describe(config).split())
    assert "0.0M parameters in bfloat16. Texts of at most 2,048 tokens; passes of 16,384 tokens" in " ".join(
        report.describe(config).split()
    )
    (row,) = [row for row in memory_plan(config, model_sizes(config)) if row.role == "reward model rm"]
    assert (row.count, row.on_gpu, row.weights) == (2, False, 2 * (512 * 64 + 64))
    assert row.activations == 16_384 * (2 * (4 * 64 + 2 * 64 + 2 * 64 + 4 * 128) + 8 * 64)
    on_gpus = {"source": source, "device": "cuda", "gpus_per_replica": 2, "tokens_per_batch": 1024}
    config = with_rewards([{"name": "rm", "model": on_gpus}, {"name": "b", "function": "exact_match"}])
    rows = {row.role: row for row in memory_plan(config, model_sizes(config))}
    row = rows["reward model rm"]
    assert (row.count, row.on_gpu, row.weights) == (2, True, 512 * 64 + 64)
    assert rows["reward"].count == 1 and rows["reward"].programs % 2 == 0, "the service of the function and its worker"
    assert "rm: 1 service on 2 GPU: the reward model" in " ".join(report.describe(config).split())


def test_the_plan_of_a_missing_reward_model_names_the_folder(tmp_path: Path) -> None:
    config = with_rewards([{"name": "rm", "model": str(tmp_path / "none")}])
    with pytest.raises(ConfigError, match=r"reward\.model\.source = .*: no such folder"):
        report.describe(config)


@pytest.mark.parametrize(
    ("recipe", "texts"),
    [
        (
            "agents_external",
            [
                "at http://127.0.0.1:8000 (HTTP of OpenAI and Anthropic) and 127.0.0.1:50070 (gRPC)",
                "the run waits for agents",
                "reward none, because agents reward their sessions themselves.",
            ],
        ),
        (
            "agents_calculator",
            [
                "or ask the reward service for it",
                "the tools `examples/environments/calculator.py:calculate`. Each plays at most 32 episodes of",
                "reward 1 service, 1 worker process: `last_number`",
            ],
        ),
        ("agents_guessing", ["`examples/environments/guessing.py:Guessing` (python). Each plays at most 48 episodes"]),
    ],
)
def test_the_plan_has_the_part_of_agents(recipe: str, texts: list[str]) -> None:
    config = configuration.load(RECIPES / f"{recipe}.toml")
    plan = " ".join(report.describe(config).split())
    for text in texts:
        assert text in plan
    roles = {row.role for row in memory_plan(config, model_sizes(config))}
    assert {"gateway", "environment"} & roles == {"gateway"} | (
        {"environment"} if config.environment.replicas else set()
    )
    assert ("reward" in roles) == config.needs_scorer
