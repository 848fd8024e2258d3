"""Runs tasks of lm-evaluation-harness on the engines of an evaluation. Imports `lm_eval`: the extra `lm-eval`.

The harness runs in a thread. Its requests become calls on the coordinator's event loop, with the router's retries.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, Final, TypeVar

import numpy as np
from lm_eval import simple_evaluate
from lm_eval.api.model import TemplateLM
from lm_eval.tasks import TaskManager

from fourfold.config import Config, EvalSet
from fourfold.coordinator.v1.membership_service_pb2 import Role
from fourfold.errors import ConfigError
from fourfold.model.tokenizer import Tokenizer
from fourfold.seeds import derive_seed

from ...data.prompts import Prompt
from ...routing.router import Router
from ...routing.scheduling import Demand
from ...state.samples import prompt_length
from ..service_calls import ServiceCalls

T = TypeVar("T")

_IN_FLIGHT: Final = 512  # requests
_MOST_SCORED: Final = 4096  # tokens of ScoreTokens
_NEW_TOKENS: Final = 256  # the harness's own default


def run_tasks(
    names: Sequence[str],
    include_path: str,
    *,
    loop: asyncio.AbstractEventLoop,
    config: Config,
    tokenizer: Tokenizer,
    service_calls: ServiceCalls,
    router: Router,
) -> dict[str, Any]:
    """Run tasks; call it in a thread, because the harness takes seconds to import and to find its tasks.

    Returns:
        The harness's results by task: metric name and value each, and "alias", "sample_len" and the like.

    Args:
        names: Tasks of the harness.
        loop: Event loop of the calls.
        include_path: Folder with tasks of the user's own; empty: none.

    Raises:
        ConfigError: There is no such task, or it needs log-probabilities of whole documents.
        FourfoldError: The engines failed.
    """
    manager = TaskManager(include_path=include_path or None)
    if unknown := [name for name in names if name not in manager.all_tasks]:
        raise ConfigError(
            f"--lm-eval {','.join(unknown)}: lm-evaluation-harness has no such task; see `lm-eval ls tasks`, or give "
            f"the folder of tasks of your own with --lm-eval-path"
        )
    found = simple_evaluate(
        EngineModel(loop, config, tokenizer, service_calls, router),
        tasks=list(names),
        task_manager=manager,
        apply_chat_template=config.data.chat,
        system_instruction=config.data.system_prompt or None,
        fewshot_as_multiturn=config.data.chat,
        log_samples=False,
    )
    return dict(found["results"])


class EngineModel(TemplateLM):  # type: ignore[misc]
    """The model of the harness: the engines of an evaluation."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        config: Config,
        tokenizer: Tokenizer,
        service_calls: ServiceCalls,
        router: Router,
    ) -> None:
        super().__init__()
        self._loop, self._config, self._tokenizer = loop, config, tokenizer
        self._service_calls, self._router = service_calls, router
        self._turns = asyncio.Semaphore(_IN_FLIGHT)
        self._count = 0

    @property
    def eot_token_id(self) -> int:
        return self._tokenizer.stop_token_ids[0]

    @property
    def tokenizer_name(self) -> str:
        return self._config.model.source.replace("/", "__")

    def chat_template(self, chat_template: bool | str = False) -> str:
        return ""  # that of the tokenizer, which `apply_chat_template` uses

    def apply_chat_template(self, chat_history: list[dict[str, Any]], add_generation_prompt: bool = True) -> str:
        if not add_generation_prompt:
            raise ConfigError("the task gives the beginning of the answer (gen_prefix), which is not supported")
        return self._tokenizer.render_chat(chat_history)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        special = not self._config.data.chat if add_special_tokens is None else add_special_tokens
        return self._tokenizer.encode(string, add_special=special)

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        return self._run([self._generate(*request.args) for request in requests])

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        raise ConfigError(
            "the task measures the perplexity of whole documents (loglikelihood_rolling), which is not supported; "
            "choose tasks that generate, or that compare continuations"
        )

    def _loglikelihood_tokens(self, requests: list[Any], **_: Any) -> list[tuple[float, bool]]:
        return self._run([self._compare(context, continuation) for _, context, continuation in requests])

    def _run(self, work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
        """Await coroutines on the event loop, from the harness's thread; the first error cancels the others."""

        async def limited(each: Coroutine[Any, Any, T]) -> T:
            async with self._turns:
                return await each

        async def everything() -> list[T]:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(limited(each)) for each in work]
            return [task.result() for task in tasks]

        try:
            return asyncio.run_coroutine_threadsafe(everything(), self._loop).result()
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def _generate(self, context: str, options: dict[str, Any]) -> str:
        """Return the answer to a prompt, cut at the first of the stop texts."""
        temperature = float(options.get("temperature", 0.0)) if options.get("do_sample") else 0.0
        length = int(options.get("max_gen_toks", _NEW_TOKENS))
        ids = await self._sample(self.tok_encode(context), length, temperature)
        text = self._tokenizer.decode(ids)
        stops = options.get("until") or []
        for stop in [stops] if isinstance(stops, str) else stops:
            text = text.partition(stop)[0] if stop else text
        return text

    async def _compare(self, context: list[int], continuation: list[int]) -> tuple[float, bool]:
        """Return the log-probability of a continuation, and whether greedy decoding gives it."""
        limit = min(self._config.model.max_context_tokens - 1, _MOST_SCORED)
        if len(continuation) >= limit:
            raise ConfigError(
                f"the task compares a continuation of {len(continuation)} tokens, and at most {limit - 1} fit; raise "
                f"model.max_context_tokens with --set (up to {_MOST_SCORED + 1} help)"
            )
        ids = [*context, *continuation][-limit:]
        logprobs, _ = await self._router.call(
            Role.ROLE_ROLLOUT,
            lambda replica: replica.rollout.score_tokens(ids, timeout=self._config.trainer.step_timeout_seconds),
            demand=Demand(samples=1, tokens=len(ids)),
            spend=self._service_calls.budget().spend,
            version=0,
        )
        greedy = await self._sample(ids[: len(ids) - len(continuation)], len(continuation), 0.0)
        return float(logprobs[-len(continuation) :].sum(dtype=np.float64)), greedy == continuation

    async def _sample(self, prompt: list[int], length: int, temperature: float) -> list[int]:
        """Return sampled tokens; a prompt that is too long loses its beginning."""
        self._count += 1
        name = f"lm-eval-{self._count}"
        room = self._config.model.max_context_tokens - length
        if room < 1:
            raise ConfigError(
                f"the task asks for {length} new tokens, and model.max_context_tokens is "
                f"{self._config.model.max_context_tokens}; raise it with --set"
            )
        (sample,) = await self._service_calls.generate(
            Prompt(
                index=self._count,
                text="",
                token_ids=np.asarray(prompt[-room:], np.int32),
                answer="",
                metadata_json="{}",
                group_key="",
            ),
            group_id=name,
            sample_ids=[name],
            seed=derive_seed(self._config.seed, "lm-eval", self._count),
            version=0,
            held_out=EvalSet(
                name="lm-eval",
                source=None,
                samples_per_prompt=1,
                max_prompts=0,
                temperature=temperature,
                max_new_tokens=length,
            ),
            budget=self._service_calls.budget(),
        )
        ids: list[int] = sample.token_ids[prompt_length(sample) :].tolist()
        return ids
