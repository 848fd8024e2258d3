"""Scores the texts with plain transformers: sorted by length, padded, in batches of one size.

    python -m fourfold_bench.reward_model.plain SETTINGS MODEL FOLDER

The tokens are ready before a round, so that only forward passes, copies and padding count. Requests (see turns.py):
{"attention", "prepare": true} finds the best batch size, and {"attention"} measures a round with it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch
import transformers

from fourfold.host.process_tree import die_with_parent
from fourfold_bench.reward_model import turns
from fourfold_bench.reward_model.benchmark import RewardModelSettings

NAME: Final = "plain"
_SIZES: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
# Sizes beyond the best one are slower in the end: two of them in a row, below this share of the best, end the search.
_WORSE: Final = 0.95
_SHARE: Final = 6  # of the texts, with which batch sizes are compared
_LEAST_TEXTS: Final = 64


class PlainModel:
    """The model, as `from_pretrained` makes it."""

    def __init__(self, settings: RewardModelSettings, model: Path) -> None:
        self.device = torch.device("cuda:0" if settings.on_gpu else "cpu")
        self._model: Any = transformers.AutoModelForSequenceClassification.from_pretrained(
            model, dtype=getattr(torch, settings.dtype)
        )
        self._model.eval()
        self._model.to(self.device)
        texts = settings.texts()
        self._order = sorted(range(len(texts)), key=lambda i: -len(texts[i]))
        self._texts = texts
        self._sizes: dict[str, int] = {}
        self._longest_first = [torch.tensor(texts[i]) for i in self._order]

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        attention = request["attention"]
        self._model.set_attn_implementation(attention)
        if request.get("prepare"):
            speeds = self._try_sizes()
            self._sizes[attention] = max(speeds, key=lambda size: speeds[size])
            return {"batch_size": self._sizes[attention], "batch_sizes": {str(s): v for s, v in speeds.items()}}
        began = time.perf_counter()
        found = self._score(self._longest_first, self._sizes[attention])
        seconds = time.perf_counter() - began
        scores = [0.0] * len(found)
        for index, score in zip(self._order, found, strict=True):
            scores[index] = score
        self._empty()  # the other processes of the device need it
        return {"seconds": seconds, "scores": scores}

    def _try_sizes(self) -> dict[int, float]:
        """Return tokens/s by batch size; a size that does not fit into the memory, and larger ones, are missing."""
        step = max(1, min(_SHARE, len(self._longest_first) // _LEAST_TEXTS))
        texts, speeds, worse = self._longest_first[::step], dict[int, float](), 0
        tokens = sum(len(text) for text in texts)
        self._score(texts[: min(4, len(texts))], 2)  # the first pass makes handles and compiles kernels
        for size in _SIZES:
            try:
                # The largest batch of a round has the longest of all texts.
                self._score(self._longest_first[:size], size)
                began = time.perf_counter()
                self._score(texts, size)
                speeds[size] = tokens / (time.perf_counter() - began)
            except RuntimeError as error:  # out of memory, or too many samples for a kernel
                print(f"batch size {size}: {error}", flush=True)
                self._empty()
                break
            worse = worse + 1 if speeds[size] < _WORSE * max(speeds.values()) else 0
            if worse == 2 or size >= len(texts):
                break
        self._empty()
        if not speeds:
            raise RuntimeError("one text alone does not fit into the memory")
        return speeds

    def _score(self, texts: Sequence[torch.Tensor], size: int) -> list[float]:
        results = []
        with torch.inference_mode():
            for first in range(0, len(texts), size):
                batch = texts[first : first + size]
                ids = torch.nn.utils.rnn.pad_sequence(list(batch), batch_first=True, padding_value=0)
                mask = torch.zeros_like(ids)
                for row, text in enumerate(batch):
                    mask[row, : len(text)] = 1
                output = self._model(
                    input_ids=ids.to(self.device), attention_mask=mask.to(self.device), use_cache=False
                )
                results.append(output.logits[:, 0].float())
            return [float(score) for score in torch.cat(results).cpu()]

    def _empty(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    die_with_parent()
    plain = PlainModel(RewardModelSettings.read(Path(sys.argv[1])), Path(sys.argv[2]))
    turns.serve(Path(sys.argv[3]), NAME, plain.answer)
