"""A frozen causal language model that looks tokens up: packed batches under a token budget, in inference mode.

The forward pass and the chunked log-probabilities are those of the trainer (`fourfold.nn`), so
that both give the same numbers for the same weights.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
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
    """The caller of `ReferenceModel.logprobs` asked it to stop."""


class ReferenceModel:
    """Loaded once, never changed. One call at a time."""

    def __init__(self, model: Any, *, device: torch.device, tokens_per_batch: int) -> None:
        """Wrap a model that `load` made."""
        self._model = model
        self._device = device
        self.tokens_per_batch = tokens_per_batch
        """Most tokens in one forward pass."""
        self.vocabulary_size: int = model.config.get_text_config().vocab_size

    @classmethod
    def load(
        cls, folder: Path, *, dtype: str, device: str, tokens_per_batch: int, max_context_tokens: int
    ) -> ReferenceModel:
        """Read a Hugging Face model folder.

        Args:
            folder: with config.json and safetensors.
            dtype: "bfloat16" or "float32", of the weights.
            device: "cpu" or "cuda".
            tokens_per_batch: most tokens in one forward pass.
            max_context_tokens: longest sample.

        Raises:
            ConfigError: no such device, or a folder that is no causal language model of this size.
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
        place = torch.device(device)
        model.to(place)
        forward.install(model)
        return cls(model, device=place, tokens_per_batch=tokens_per_batch)

    def logprobs(
        self,
        token_ids: Sequence[Int32Array],
        temperatures: Sequence[float],
        *,
        stopped: Callable[[], bool] = lambda: False,
    ) -> list[Float32Array]:
        """Look samples up; blocks.

        Args:
            token_ids: int32 [n] of each sample, 2 <= n <= tokens_per_batch, checked.
            temperatures: of each sample, above 0; divide the logits.
            stopped: asked before each batch.

        Returns:
            float32 [n] of each sample in the order given: natural-log probabilities, the first NaN.

        Raises:
            Stopped: `stopped` said so.
        """
        results = [np.full(len(ids), np.nan, np.float32) for ids in token_ids]
        under_way: deque[_Pass] = deque()

        def finish() -> None:
            for index, row in under_way.popleft().rows():
                results[index][1:] = row

        for indices in split_by_tokens([len(ids) for ids in token_ids], max_tokens=self.tokens_per_batch):
            if stopped():
                raise Stopped
            ids = [token_ids[i] for i in indices]
            batch = pack(ids, [np.arange(1, len(i)) for i in ids], [temperatures[i] for i in indices])
            with torch.inference_mode():
                logprobs, _ = self._model(**forward.batch_arguments(batch, self._device))
            under_way.append(_Pass(indices, [len(i) - 1 for i in ids], logprobs))
            if len(under_way) > 1:  # the device has its next work before the host looks at what is done
                finish()
        while under_way:
            finish()
        return results


class _Pass:
    """One forward pass on its way to the host."""

    def __init__(self, indices: Sequence[int], counts: Sequence[int], logprobs: Tensor) -> None:
        """Begin to copy `logprobs`, float32 [sum(counts)], which belong to the samples `indices`."""
        self._indices, self._counts = indices, counts
        self._event: torch.cuda.Event | None = None
        self._host = logprobs
        if logprobs.device.type == "cuda":
            self._host = torch.empty_like(logprobs, device="cpu", pin_memory=True)
            self._host.copy_(logprobs, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def rows(self) -> Iterator[tuple[int, Float32Array]]:
        """Wait for the copy; return each sample's index and log-probabilities."""
        if self._event is not None:
            self._event.synchronize()
        return zip(self._indices, np.split(self._host.numpy(), np.cumsum(self._counts[:-1])), strict=True)
