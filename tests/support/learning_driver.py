"""Every preset on a tiny generated model: `python -m tests.support.learning_driver MODEL OUT PRESET...`.

`grpo-lora` is grpo with adapters.

The trainer is the real one, DeepSpeed included; the sampler is a plain PyTorch loop over the
weights that it exports. A token with an id in the lower half of the vocabulary is worth a point,
so that the reward of a random model is about a half. OUT/<preset>.json gets the mean reward of
each step.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import transformers

from fourfold.algorithm.state import AlgorithmState
from fourfold.config import Config
from fourfold.sample import Sample, VersionSpan
from fourfold_trainer.ranks.distributed_engine import DistributedEngine
from fourfold_trainer.step.train_step import train_step

STEPS: Final = 20
RISE: Final = 0.12
NEW_TOKENS: Final = 10
PROMPTS: Final = np.arange(1, 25, dtype=np.int64).reshape(6, 4) * 17 % 512  # six prompts of four tokens
# What learns at this size: GSPO's narrow clip needs several small updates, the critic a head start.
MINI_BATCHES: Final = {"gspo": 4, "ppo": 2, "dapo": 2, "vapo": 2, "verl-ppo": 2}
LORA: Final = "-lora"
# Ten tokens are so few that VAPO's lambda of 1 - 1 / (0.05 n) would be 0.
CHANGES: Final[dict[str, Any]] = {"vapo": {"advantage": {"kind": "gae", "lam_length_factor": 1.0}}}


def recipe(preset: str, model: Path) -> Config:
    """Return a recipe of a preset for the tiny model."""
    return Config.model_validate(
        {
            "name": "learning",
            "steps": STEPS,
            "seed": 5,
            "model": {"source": str(model), "dtype": "float32", "max_context_tokens": 32},
            "data": {"train": {"path": "unused.jsonl"}},
            "sampling": {"max_new_tokens": NEW_TOKENS},
            "batch": {
                "prompts_per_step": len(PROMPTS),
                "group_size": 8,
                "tokens_per_micro_batch": 512,
                "mini_batches_per_step": MINI_BATCHES.get(preset, 1),
            },
            "algorithm": {"preset": preset.removesuffix(LORA), **CHANGES.get(preset, {})},
            "trainer": {
                "zero_stage": 0,
                "learning_rate": 1e-2 if preset.endswith(LORA) else 3e-3,
                "step_timeout_seconds": 60,
                "lora": {"rank": 4} if preset.endswith(LORA) else {},
            },
            "critic": {"learning_rate": 3e-3},
        }
    )


@torch.no_grad()
def sample(model: Any, reference: Any, config: Config, *, step: int) -> list[Sample]:
    """Draw a batch from `model`."""
    generator = torch.Generator().manual_seed(1000 + step)
    size = config.batch.group_size
    ids = torch.from_numpy(np.repeat(PROMPTS, size, 0))
    for _ in range(NEW_TOKENS):
        probabilities = torch.softmax(model(input_ids=ids).logits[:, -1], -1)
        ids = torch.cat([ids, torch.multinomial(probabilities, 1, generator=generator)], 1)
    behavior, frozen = _logprobs(model, ids), _logprobs(reference, ids)
    mask = np.arange(ids.shape[1]) >= PROMPTS.shape[1]
    spans = (
        VersionSpan(policy_version=-1, token_count=PROMPTS.shape[1]),
        VersionSpan(policy_version=0, token_count=NEW_TOKENS),
    )
    return [
        Sample(
            sample_id=f"{step}-{row}",
            group_id=f"{step}-{row // size}",
            token_ids=tokens.astype(np.int32),
            behavior_logprobs=np.where(mask, behavior[row], np.nan).astype(np.float32),
            action_mask=mask,
            loss_mask=mask,
            version_spans=spans,
            temperature=1.0,
            score=float((tokens[mask] < 256).mean()),
            reference_logprobs=frozen[row],
        )
        for row, tokens in enumerate(ids.numpy())
    ]


def _logprobs(model: Any, ids: torch.Tensor) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Return the log-probability of every token, NaN for the first."""
    rows = torch.log_softmax(model(input_ids=ids).logits[:, :-1].float(), -1)
    found = rows.gather(2, ids[:, 1:, None]).squeeze(2)
    return np.concatenate([np.full((len(ids), 1), np.nan, np.float32), found.numpy()], 1)


def learn(preset: str, folder: Path, out: Path) -> list[float]:
    """Train until the reward has risen, at most STEPS steps; return the mean reward of each step."""
    config = recipe(preset, folder)
    engine = DistributedEngine(config, folder, run_dir=out, member_id="trainer-0", on_death=_say)
    reference = load(folder)
    state, rewards = AlgorithmState(), list[float]()
    for step in range(1, STEPS + 1):
        exported = out / "exported"
        exported.mkdir(exist_ok=True)
        engine.export(exported)
        samples = sample(load(exported), reference, config, step=step)
        rewards.append(float(np.mean([s.score for s in samples])))
        if has_learned(rewards):
            break
        state = train_step(engine, samples, config, step=step, state=state).algorithm_state
    engine.leave()
    engine.close()
    return rewards


def has_learned(rewards: Sequence[float]) -> bool:
    """Return whether the last three steps are above the first by four times the standard error of the difference."""
    return len(rewards) > 3 and bool(np.mean(rewards[-3:]) > rewards[0] + RISE)


def load(folder: Path) -> Any:
    """Return a plain model."""
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.eval()


def _say(message: str) -> None:
    sys.stderr.write(f"{message}\n")


def main(model: Path, out: Path, presets: Sequence[str]) -> None:
    """Train every preset, one after another."""
    for preset in presets:
        began = time.monotonic()
        rewards = learn(preset, model, out)
        seconds = time.monotonic() - began
        (out / f"{preset}.json").write_text(json.dumps({"rewards": rewards, "seconds": seconds}))
        sys.stderr.write(f"{preset}: {rewards[0]:.2f} -> {rewards[-1]:.2f} in {seconds:.1f} s\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
