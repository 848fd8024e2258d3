"""Writes the folder of a run of made-up trajectories, step by step, with the formats and the code of a real run.

Words follow Zipf's law, as those of real texts do: a common word is in every trajectory, a rare one in few.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from fourfold.host.disk import append_lines
from fourfold.sample import Sample, ScoreTerm, VersionSpan
from fourfold_coordinator.data.prompts import Prompt
from fourfold_coordinator.state.sample_tokens import TOKENS_FILE, to_token_lines
from fourfold_coordinator.state.samples import SAMPLES_FILE, Trajectory, to_lines

_WORDS: Final = 20_000
MARKED_WORD: Final = "zanzibar"
"""A word of one trajectory in a thousand."""
_GROUP_SIZE: Final = 8
_PROMPT_TOKENS: Final = 64
_RECIPE: Final = """
name = "{name}"
seed = 1
steps = {steps}

[model]
source = "{model}"
max_context_tokens = {context}

[data]
train = {{ path = "data.jsonl" }}

[sampling]
max_new_tokens = {tokens}

[reward]
function = "scorer.py:score"

[batch]
prompts_per_step = {prompts}
group_size = 8
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunShape:
    """Size of a run."""

    steps: int
    prompts_per_step: int
    tokens: int  # sampled ones of a trajectory
    distinct_steps: int  # with texts of their own; later steps repeat these under other names


class SyntheticRun:
    """A run in `folder` that `write_step` appends to."""

    def __init__(self, folder: Path, shape: RunShape) -> None:
        self.folder, self.shape = folder, shape
        self._random = np.random.default_rng(7)
        letters = np.array(list("abcdefghijklmnopqrstuvwxyz"))
        lengths = self._random.integers(2, 9, _WORDS)
        self._words = [" " + "".join(self._random.choice(letters, n)) for n in lengths]
        self._words[-1] = f" {MARKED_WORD}"
        weights = 1 / np.arange(1, _WORDS)  # without the marked word
        self._begins = list[dict[str, int]]()  # where the lines of each step begin
        self._cumulative = np.cumsum(weights) / weights.sum()
        folder.mkdir(parents=True, exist_ok=True)
        self._write_model(folder / "model")
        recipe = _RECIPE.format(
            name=folder.name, steps=shape.steps, model=folder / "model", context=shape.tokens + _PROMPT_TOKENS + 8,
            tokens=shape.tokens, prompts=shape.prompts_per_step,
        )  # fmt: skip
        (folder / "config.toml").write_text(recipe)

    def _write_model(self, folder: Path) -> None:
        """Write a byte-level tokenizer that has the words as tokens."""
        import tokenizers
        from tokenizers import decoders, models, pre_tokenizers

        vocabulary = {word.replace(" ", "\u0120"): index for index, word in enumerate(dict.fromkeys(self._words))}
        tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        folder.mkdir(exist_ok=True)
        tokenizer.save(str(folder / "tokenizer.json"))
        (folder / "config.json").write_text(json.dumps({"vocab_size": len(vocabulary)}))
        self._words = [word.replace("\u0120", " ") for word in vocabulary]

    def write_step(self, step: int) -> None:
        """Append the lines of one step."""
        if step > self.shape.distinct_steps:
            self._repeat((step - 1) % self.shape.distinct_steps + 1, step)
            return
        trajectories = list(self._trajectories(step))
        self._begins.append({name: _size_of(self.folder / name) for name in (TOKENS_FILE, SAMPLES_FILE)})
        append_lines(self.folder / TOKENS_FILE, to_token_lines(step, trajectories))
        append_lines(self.folder / SAMPLES_FILE, to_lines(step, trajectories))
        append_lines(self.folder / "metrics.jsonl", json.dumps(self._metrics(step, trajectories)).encode() + b"\n")

    def _repeat(self, source: int, step: int) -> None:
        """Append the lines of an earlier step as those of another one."""
        names = {self._group(source, place): self._group(step, place) for place in range(self.shape.prompts_per_step)}
        for name in (TOKENS_FILE, SAMPLES_FILE):
            path, lines = self.folder / name, list[str]()
            with path.open("rb") as file:
                file.seek(self._begins[source - 1][name])
                for _ in range(_GROUP_SIZE * self.shape.prompts_per_step):
                    line = json.loads(file.readline())
                    line |= {"step": step, "sample_id": names[line["sample_id"][:-2]] + line["sample_id"][-2:]}
                    if name == SAMPLES_FILE:
                        spans = [[-1, _PROMPT_TOKENS], [step - 1, self.shape.tokens]]
                        line |= {"group_id": line["sample_id"][:-2], "version_spans": spans}
                    lines.append(json.dumps(line, ensure_ascii=False) + "\n")
            append_lines(path, "".join(lines).encode())
        append_lines(self.folder / "metrics.jsonl", json.dumps(self._metrics(step, [])).encode() + b"\n")

    def _group(self, step: int, place: int) -> str:
        return f"p{step * self.shape.prompts_per_step + place:07d}-0"

    def _trajectories(self, step: int) -> Iterator[Trajectory]:
        for place in range(self.shape.prompts_per_step):
            # Prompts come back after 100 steps.
            index = (step % 100) * self.shape.prompts_per_step + place
            prompt_ids = self._ids(np.random.default_rng(index), _PROMPT_TOKENS)
            prompt = Prompt(
                index=index,
                text=self._text(prompt_ids),
                token_ids=prompt_ids,
                answer=str(index),
                metadata_json="{}",
                group_key=str(index),
            )
            group = self._group(step, place)
            for number in range(_GROUP_SIZE):
                yield self._trajectory(step, prompt, group, number)

    def _trajectory(self, step: int, prompt: Prompt, group: str, number: int) -> Trajectory:
        ids = self._ids(self._random, self.shape.tokens)
        if self._random.random() < 1e-3:
            ids[self.shape.tokens // 2] = len(self._words) - 1
        score = float(self._random.random() < 0.2 + 0.6 * step / self.shape.steps)
        before, total = len(prompt.token_ids), len(prompt.token_ids) + len(ids)
        mask = np.zeros(total, np.bool_)
        mask[before:] = True
        logprobs = np.full(total, np.nan, np.float32)
        logprobs[before:] = -self._random.exponential(0.4, len(ids))
        own = VersionSpan(policy_version=step - 1, token_count=len(ids))
        sample = Sample(
            sample_id=f"{group}-{number}",
            group_id=group,
            token_ids=np.concatenate([prompt.token_ids, ids], dtype=np.int32),
            behavior_logprobs=logprobs,
            action_mask=mask,
            loss_mask=mask,
            version_spans=(VersionSpan(policy_version=-1, token_count=before), own),
            temperature=1.0,
            score=score,
            scorer="last_number@0.1.0",
            terms=(ScoreTerm(name="reward", score=score, weight=1.0, scorer="last_number@0.1.0"),),
        )
        return Trajectory(prompt=prompt, segments=(sample,), completion=self._text(ids))

    def _ids(self, random: np.random.Generator, count: int) -> Any:
        return np.searchsorted(self._cumulative, random.random(count)).clip(0, len(self._words) - 2).astype(np.int32)

    def _text(self, ids: Any) -> str:
        return "".join(self._words[index] for index in ids)

    def _metrics(self, step: int, trajectories: list[Trajectory]) -> dict[str, Any]:
        share = step / self.shape.steps
        scores = [t.sample.score or 0.0 for t in trajectories] or [0.2 + 0.6 * share]
        return {
            "step": step, "reward/mean": float(np.mean(scores)), "reward/std": float(np.std(scores)),
            "length/response_mean": float(self.shape.tokens), "kl/ref": 0.02 * share,
            "mismatch/logprob_diff_mean": 0.004 + 0.001 * math.sin(step), "policy/entropy": 1.2 - 0.5 * share,
            "time/generate": 6.0, "time/reward": 0.5, "time/train": 4.0, "time/publish": 0.4, "time/step": 11.0,
            "end_time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(1.8e9 + 11 * step)), "diagnosis": "",
            "alarms": [], "lag_change": "", "scorers": {},
        }  # fmt: skip


def _size_of(path: Path) -> int:
    """Return the bytes of a file; 0 if it is missing."""
    return path.stat().st_size if path.exists() else 0
