"""Gives requests a grammar in vLLM's scheduler, without vLLM's front end, tokenizer and compilation.

    request with GRAMMAR --> attach: waits for its grammar --> compiled in a thread --> scheduled by vLLM
    each step:  vLLM fills the bits of the allowed tokens --> our `fill_bitmask` also writes the flag of the next token
                worker: logits of forbidden tokens = -inf --> sampled, with the log-probability of this distribution

vLLM refuses grammars without its tokenizer, which an engine of token ids does not load, starts every grammar at the end
of the prompt, and does not report which tokens were constrained. The service has compiled the grammar before, with
limits, so an error here is a fault.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output.backend_types import StructuredOutputGrammar
from vllm.v1.structured_output.request import StructuredOutputRequest

from fourfold_rollout.engine import GrammarConstraint
from fourfold_rollout.vllm.logprob_table import GRAMMAR, SLOT, Flags, open_flags

_COMPILER_THREADS: Final = 2


class EngineGrammars:
    """Compiles the grammars of an engine in one thread, and is the backend of vLLM's manager of structured outputs."""

    def __init__(self, model_config: Any, manager: Any) -> None:
        self._folder = Path(model_config.model)
        self._manager = manager
        self._executor: ThreadPoolExecutor | None = None
        self._compiler: Any = None
        self._flags: dict[str, Flags] = {}  # by the path of the table

    def attach(self, request: Request, extra: Mapping[str, Any]) -> None:
        """Let a request wait for its grammar. Call it before vLLM's `add_request`, which reads the status."""
        if self._executor is None:
            self._executor = ThreadPoolExecutor(1, thread_name_prefix="grammars")
        self._manager.backend = self
        # vLLM reads only the grammar of the object; its parameters must name some constraint.
        wanted = StructuredOutputRequest(params=StructuredOutputsParams(json_object=True))
        wanted.grammar = self._executor.submit(self._start, request, extra[GRAMMAR], extra[SLOT])
        request.structured_output_request = wanted
        request.status = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR

    def allocate_token_bitmask(self, count: int) -> Any:
        """Return int32 [count, words]; vLLM calls it after the first grammar is compiled."""
        import xgrammar

        return xgrammar.allocate_token_bitmask(count, self._compiler.vocabulary_size)

    def destroy(self) -> None:
        """Called by vLLM at its end."""
        if self._executor is not None:
            self._executor.shutdown(wait=False, cancel_futures=True)

    def _start(self, request: Request, wanted: list[Any], slot: int) -> SampleGrammar:
        if self._compiler is None:
            from fourfold_rollout.vllm.text.grammar import GrammarCompiler

            self._compiler = GrammarCompiler(self._folder, threads=_COMPILER_THREADS)
        kind, text, prefix_count, path, slots, width = wanted
        if path not in self._flags:
            self._flags = {path: open_flags(path, slots, width)}
        params, prompt = request.sampling_params, request.prompt_token_ids
        assert params is not None and prompt is not None
        constraint = GrammarConstraint(kind=kind, text=text, prefix_count=prefix_count)
        accepted = prompt[len(prompt) - prefix_count :]
        state = self._compiler.start(constraint, params.stop_token_ids or [], accepted)
        return SampleGrammar(state, self._flags[path][slot])


class SampleGrammar(StructuredOutputGrammar):
    """The grammar of one request, as vLLM uses it; `flags` is the row of its sample."""

    def __init__(self, state: Any, flags: Any) -> None:
        self._state, self._flags = state, flags
        self._count = 0  # tokens sampled

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        """Advance by sampled tokens; return False if one is forbidden."""
        for token in tokens:
            if self._state.ended:
                return True
            if not self._state.accept(token):
                return False
            self._count += 1
        return True

    def fill_bitmask(self, bitmask: Any, batch_index: int) -> None:
        """Set the bits of the tokens that may come next, and the flag of the next token."""
        self._flags[self._count] = self._state.fill(bitmask, batch_index)

    def is_terminated(self) -> bool:
        return bool(self._state.ended)

    def validate_tokens(self, tokens: list[int]) -> list[int]:
        raise AssertionError("only speculative decoding calls it, which Fourfold refuses")

    def rollback(self, num_tokens: int) -> None:
        raise AssertionError("only speculative decoding calls it, which Fourfold refuses")

    def reset(self) -> None:
        raise AssertionError("vLLM does not call it")
