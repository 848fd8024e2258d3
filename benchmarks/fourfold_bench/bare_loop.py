"""Does the quickstart's work in one process of plain PyTorch and transformers, for comparison with a run.

It has no vLLM, DeepSpeed, gRPC or weight transfer: only `generate`, score, advantages, and one AdamW step on the
samples with an advantage, without passes for old or reference log-probabilities. Prompts, batch sizes, dtype and
learning rate come from the recipe; master weights are float32.

    python -m fourfold_bench.bare_loop --steps 6
    python -m fourfold_bench.bare_loop --steps 9 --against runs/quickstart --save

`--against` compares medians of the same steps of a run: all but the first, without evaluation and checkpoints.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from fourfold import config as recipes
from fourfold.model import folder as model_folder
from fourfold.model.tokenizer import Tokenizer
from fourfold_bench.harness import Benchmark, BenchmarkRun, BenchmarkSettings, option, run_script
from fourfold_coordinator.data.prompts import Prompt, load_prompts
from fourfold_reward import ScoreInput, verifiers


class BareLoop:
    """A model, its master weights in float32, and an optimizer."""

    def __init__(self, config: recipes.Config) -> None:
        folder = model_folder.resolve(config.model.source)
        self.config = config
        self.tokenizer = Tokenizer.load(folder)
        self.prompts = load_prompts(config, self.tokenizer)
        scorer = config.reward[0]
        self.score = verifiers.load(scorer.function, {scorer.function: scorer.options})
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, config.model.dtype))
        self.masters = [p.detach().float() for p in self.model.parameters()]  # the model's own tensors if it is float32
        self.optimizer = torch.optim.AdamW(self.masters, lr=config.trainer.learning_rate, weight_decay=0.0)

    def step(self, number: int) -> dict[str, float]:
        """Run one step; return seconds per phase, tokens and the mean reward."""
        count = self.config.batch.prompts_per_step
        prompts = [
            self.prompts.at(number * count + i) for i in range(count) for _ in range(self.config.batch.group_size)
        ]
        began = time.perf_counter()
        tokens, mask = self.generate(prompts)
        generated = time.perf_counter()
        rewards = np.array([self.reward(p, t, m) for p, t, m in zip(prompts, tokens, mask, strict=True)])
        trained = self.train(tokens, mask, self.advantages(rewards))
        return {
            "generate_seconds": generated - began,
            "train_seconds": time.perf_counter() - generated,
            "seconds": time.perf_counter() - began,
            "sampled_tokens": float(mask.sum()),
            "trained_samples": float(trained),
            "reward": float(rewards.mean()),
        }

    def generate(self, prompts: list[Prompt]) -> tuple[torch.Tensor, torch.Tensor]:
        """Sample one completion per prompt. Returns token ids [B, T] left-padded with 0, and the action mask [B, T]."""
        width = max(len(p.token_ids) for p in prompts)
        ids = torch.zeros(len(prompts), width, dtype=torch.long)
        attention = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, width - len(prompt.token_ids) :] = torch.from_numpy(prompt.token_ids.copy())
            attention[row, width - len(prompt.token_ids) :] = 1
        stops = list(self.tokenizer.stop_token_ids)
        self.model.eval()
        with torch.inference_mode():
            out = self.model.generate(
                ids,
                attention_mask=attention,
                do_sample=True,
                temperature=self.config.sampling.temperature,
                top_k=0,
                top_p=1.0,
                max_new_tokens=self.config.sampling.max_new_tokens,
                eos_token_id=stops,
                pad_token_id=stops[0],
            ).clone()
        stopped = torch.isin(out[:, width:], torch.tensor(stops))
        before = torch.cumsum(stopped.int(), 1) - stopped.int()
        mask = torch.zeros_like(out, dtype=torch.bool)
        mask[:, width:] = before == 0
        self.attention = torch.cat([attention, mask[:, width:].long()], 1)
        return out, mask

    def reward(self, prompt: Prompt, tokens: torch.Tensor, mask: torch.Tensor) -> float:
        """Return the score of the recipe's built-in verifier, a number."""
        completion = self.tokenizer.decode(tokens[mask].tolist())
        score = self.score(ScoreInput(sample_id="", prompt=prompt.text, completion=completion, answer=prompt.answer))
        return float(score)  # type: ignore[arg-type]

    def advantages(self, rewards: np.ndarray) -> torch.Tensor:
        """GRPO: (r - mean) / std of the group, 0 for constant groups."""
        groups = rewards.reshape(-1, self.config.batch.group_size)
        std = groups.std(1, ddof=1, keepdims=True)
        return torch.from_numpy(((groups - groups.mean(1, keepdims=True)) / np.where(std > 0, std, 1)).ravel()).float()

    def train(self, tokens: torch.Tensor, mask: torch.Tensor, advantages: torch.Tensor) -> int:
        """One optimizer step on the samples with an advantage; returns how many there were."""
        rows = torch.nonzero(advantages).ravel()
        self.model.train()
        total = int(mask.sum())
        size = max(1, self.config.batch.tokens_per_micro_batch // tokens.shape[1])
        completion = self.config.sampling.max_new_tokens
        for part in torch.split(rows, size):
            ids, attention, action = tokens[part], self.attention[part], mask[part][:, -completion:]
            positions = (attention.cumsum(1) - 1).clamp(min=0)
            logits = self.model(
                ids, attention_mask=attention, position_ids=positions, logits_to_keep=completion + 1
            ).logits[:, :-1]
            logprobs = torch.log_softmax(logits.float(), -1).gather(-1, ids[:, -completion:, None]).squeeze(-1)
            loss = -(logprobs * advantages[part, None] * action).sum() / total
            torch.autograd.backward(loss)
        self.update()
        return len(rows)

    def update(self) -> None:
        """AdamW on the float32 masters, clipped, copied back where the model has another dtype."""
        parameters = list(self.model.parameters())
        for master, parameter in zip(self.masters, parameters, strict=True):
            master.grad = parameter.grad.float() if parameter.grad is not None else None
            parameter.grad = None
        torch.nn.utils.clip_grad_norm_(self.masters, self.config.trainer.max_grad_norm)
        self.optimizer.step()
        with torch.no_grad():
            for master, parameter in zip(self.masters, parameters, strict=True):
                parameter.copy_(master)


def run_seconds(folder: Path) -> list[float]:
    """Return the seconds of each step of a Fourfold run, without its evaluations and checkpoints."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    aside = ("time/evaluate", "time/checkpoint")
    return [row["time/step"] - sum(row.get(name) or 0.0 for name in aside) for row in rows]


@dataclass(frozen=True, slots=True, kw_only=True)
class BareLoopSettings(BenchmarkSettings):
    """The options of the bare loop."""

    recipe: str = option(default="recipes/quickstart.toml")
    steps: int = option(default=6, least=2)
    against: str = option("folder of a finished run of the same recipe", default="")


class BareLoopBenchmark(Benchmark[BareLoopSettings]):
    """Seconds per step of the bare loop."""

    name = "bare_loop"
    summary = "the quickstart's work in one process of plain PyTorch and transformers"
    settings = BareLoopSettings
    libraries = ("torch", "transformers")

    def measure(self, settings: BareLoopSettings, run: BenchmarkRun) -> dict[str, Any]:
        config = recipes.load(Path(settings.recipe))
        torch.manual_seed(config.seed)
        loop, rows = BareLoop(config), list[dict[str, float]]()
        for number in range(settings.steps):
            rows.append(loop.step(number))
            print("  ".join(f"{name} {value:.2f}" for name, value in rows[-1].items()))
        medians = {name: statistics.median(row[name] for row in rows[1:]) for name in rows[0]}
        results: dict[str, Any] = {"median": medians, "steps": rows}
        if settings.against:
            seconds = run_seconds(Path(settings.against))[1 : settings.steps]
            median = statistics.median(seconds)
            ratio = median / medians["seconds"]
            results |= {"run_median_seconds": median, "run_seconds": seconds, "ratio": ratio}
        return results

    def table(self, document: Mapping[str, Any]) -> list[str]:
        results = document["results"]
        text = f"bare {results['median']['seconds']:.2f} s a step"
        if "ratio" in results:
            text += f", the run {results['run_median_seconds']:.2f} s: {results['ratio']:.2f} times"
        return [text]


if __name__ == "__main__":
    sys.exit(run_script(BareLoopBenchmark()))
