"""Computes log-probabilities of given tokens with a frozen causal language model, in packed batches.

The forward pass and the log-probabilities are those of the trainer (`fourfold.nn`), so that equal weights give equal
numbers in both services.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import transformers
from torch import Tensor

from fourfold.arrays import Float32Array, Int32Array
from fourfold.errors import ConfigError
from fourfold.nn import forward
from fourfold.nn.batching import pack, split_by_tokens

_DTYPES: Final = {"bfloat16": torch.bfloat16, "float32": torch.float32}


class Stopped(Exception):
    """`ReferenceModel.logprobs` stopped because its `stopped` function returned True."""


@dataclass(frozen=True, slots=True, eq=False)
class SampleRows:
    """The results for a sample of n tokens; the first row of each array is that of no prediction."""

    logprobs: Float32Array  # [n], natural logarithms; the first is NaN
    top_ids: Int32Array  # [n, top_k], the likeliest tokens, first the likeliest; the first row is 0
    top_logprobs: Float32Array  # [n, top_k]; the first row is NaN

    @classmethod
    def of(cls, count: int, top_k: int = 0) -> SampleRows:
        """Return rows of `count` tokens to be filled."""
        values = np.full(count, np.nan, np.float32), np.full((count, top_k), np.nan, np.float32)
        return cls(values[0], np.zeros((count, top_k), np.int32), values[1])


class ReferenceModel:
    """A frozen model, for one call at a time."""

    def __init__(self, model: Any, *, device: torch.device, tokens_per_batch: int) -> None:
        """Wrap a model; use `load`."""
        self._model = model
        self._device = device
        self.tokens_per_batch = tokens_per_batch  # most tokens in one forward pass
        self.vocabulary_size: int = model.config.get_text_config().vocab_size
        self.ids_below = self.vocabulary_size  # likely tokens have lower ids; serve() may lower it

    @classmethod
    def load(
        cls,
        folder: Path,
        *,
        dtype: str,
        device: str,
        tokens_per_batch: int,
        max_context_tokens: int,
        float32_logits: bool = False,
    ) -> ReferenceModel:
        """Load a Hugging Face model folder.

        Args:
            folder: contains config.json and safetensors files.
            dtype: "bfloat16" or "float32".
            device: "cpu" or "cuda".
            tokens_per_batch: most tokens in one forward pass.
            max_context_tokens: of the longest sample.
            float32_logits: as for `token_logprobs`.

        Raises:
            ConfigError: no such device, not a causal language model, or too few positions or tokens per batch.
        """
        if device == "cuda" and not torch.cuda.is_available():
            raise ConfigError("reference.device = 'cuda', but torch sees no GPU; set it to 'cpu', or start it on a GPU")
        if tokens_per_batch < max_context_tokens:
            raise ConfigError(
                f"reference.tokens_per_batch = {tokens_per_batch} cannot hold one sample of model.max_context_tokens = "
                f"{max_context_tokens}; raise the first or lower the second"
            )
        transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        try:
            model: Any = transformers.AutoModelForCausalLM.from_pretrained(
                folder, dtype=_DTYPES[dtype], local_files_only=True, use_safetensors=True
            )
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            raise ConfigError(f"{folder}: cannot be read as a causal language model: {error}") from None
        longest = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        if longest is not None and max_context_tokens > longest:
            raise ConfigError(
                f"model.max_context_tokens = {max_context_tokens} is more than the {longest} positions of {folder}; "
                f"lower it"
            )
        model.requires_grad_(False)
        model.eval()
        model.to(device)
        forward.install(model, float32_logits=float32_logits)
        return cls(model, device=torch.device(device), tokens_per_batch=tokens_per_batch)

    def logprobs(
        self,
        token_ids: Sequence[Int32Array],
        temperatures: Sequence[float],
        *,
        top_k: int = 0,
        stopped: Callable[[], bool] = lambda: False,
    ) -> list[SampleRows]:
        """Compute the log-probability of each token given those before it. Blocks.

        Args:
            token_ids: int32 [n] per sample, 2 <= n <= tokens_per_batch, valid ids.
            temperatures: divisor of the logits per sample, above 0.
            top_k: number of the likeliest tokens to return at each position, at most the vocabulary size.
            stopped: called before each forward pass.

        Returns:
            One per sample, in the order given.

        Raises:
            Stopped: `stopped` returned True.
        """
        results = [SampleRows.of(len(ids), top_k) for ids in token_ids]
        finish: Callable[[], None] | None = None
        for indices in split_by_tokens([len(ids) for ids in token_ids], max_tokens=self.tokens_per_batch):
            if stopped():
                raise Stopped
            ids = [token_ids[i] for i in indices]
            batch = pack(ids, [np.arange(1, len(i)) for i in ids], [temperatures[i] for i in indices])
            with torch.inference_mode():
                if top_k:
                    found = forward.top(self._model, batch, self._device, count=top_k, ids_below=self.ids_below)
                else:
                    found = self._model(**forward.batch_arguments(batch, self._device))[:1]
            # The GPU computes this pass while the host waits for the one before.
            finish_previous, finish = finish, _start_copy([results[i] for i in indices], found)
            if finish_previous is not None:
                finish_previous()
        if finish is not None:
            finish()
        return results


def _start_copy(rows: Sequence[SampleRows], columns: Sequence[Tensor]) -> Callable[[], None]:
    """Start the copy of columns, [sum(n - 1)] or [sum(n - 1), top_k] each, to the host.

    Returns:
        A function that waits for the copy and fills the `rows`, whose fields are in the order of the columns.
    """
    hosts, event = list(columns), None
    if columns[0].device.type == "cuda":
        # Other memory makes a copy synchronous.
        hosts = [torch.empty_like(column, device="cpu", pin_memory=True) for column in columns]
        for host, column in zip(hosts, columns, strict=True):
            host.copy_(column, non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()

    def finish() -> None:
        if event is not None:
            event.synchronize()
        ends = np.cumsum([len(row.logprobs) - 1 for row in rows])
        for host, name in zip(hosts, SampleRows.__slots__, strict=False):
            for row, values in zip(rows, np.split(host.numpy(), ends[:-1]), strict=True):
                getattr(row, name)[1:] = values

    return finish
