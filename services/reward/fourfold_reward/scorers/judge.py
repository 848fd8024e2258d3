"""Scores samples with a generative judge behind an OpenAI-compatible endpoint: `[reward] judge = {...}`."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from fourfold.config.reward import JudgeConfig
from fourfold.errors import ConfigError
from fourfold_reward.job import Job
from fourfold_reward.protocol import Outcome
from fourfold_reward.sample_queue import SlotScorer
from fourfold_reward.scorers.rubric import GradePattern, Rubric
from fourfold_reward.scorers.web import JsonClient, WebError
from fourfold_reward.scores import InvalidSample
from fourfold_reward.signatures import Reads

_log = logging.getLogger(__name__)

_MAX_BYTES: Final = 4 << 20
_FIRST_WAIT_SECONDS: Final = 0.5
_LONGEST_WAIT_SECONDS: Final = 20.0
# Of one response. More is no plausible count, and would make the costs of the run wrong.
_MAX_TOKENS: Final = 10_000_000
_BYTES_PER_TOKEN: Final = 4
_VERDICT_SHOWN: Final = 200


@dataclass(slots=True)
class _Usage:
    """Tokens and costs of all tries of a sample."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost_usd: float = 0.0


class Judge(SlotScorer):
    """A backend; see `fourfold_reward.backend.Backend`."""

    def __init__(self, judge: JudgeConfig, *, timeout_seconds: float, on_failure: Callable[[str], None]) -> None:
        """Raises ConfigError: rubric, pattern or address is malformed, or the key is missing."""
        self._judge, self._timeout = judge, timeout_seconds
        self._rubric, self._pattern = Rubric(judge), GradePattern(judge)
        address, mark, query = judge.url.partition("?")
        self._client = JsonClient(
            f"{address.rstrip('/')}/chat/completions{mark}{query}",
            key="reward.judge.url",
            connections=judge.concurrency,
            max_bytes=_MAX_BYTES,
            headers=_authorization(judge.api_key_env),
        )
        super().__init__(slots=judge.concurrency, on_failure=on_failure)
        self.reads = Reads(messages=True)
        self.tokens: Counter[str] = Counter()  # of all responses so far: prompt, completion
        self.cost_usd = 0.0  # of all responses so far

    @property
    def scorer(self) -> str:
        """Model, and a hash of all that decides its grades."""
        keys = ("url", "model", "system", "pattern", "grade_min", "grade_max", "temperature", "max_tokens")
        parts = [self._rubric.text, *(getattr(self._judge, key) for key in keys)]
        return f"{self._judge.model}@{hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:12]}"

    async def start(self) -> None:
        """Open the client. The endpoint may start later: until then, samples have errors. Raises ConfigError."""
        self._client.start()
        self.start_slots()

    async def close(self) -> None:
        await super().close()
        await self._client.close()

    async def score_batch(self, jobs: Sequence[Job]) -> Sequence[Outcome]:
        (job,) = jobs
        usage = _Usage()
        try:
            messages = self._rubric.messages(job)
            if messages is None:
                return [Outcome(abstain_reason="NO_ANSWER")]
            outcome = await self._ask(messages, usage)
        except InvalidSample as error:
            return [Outcome.error(error.reason, str(error))]
        except TimeoutError:
            text = f"{self._client.title} took longer than {self._timeout:g} s; raise reward.timeout_seconds"
            outcome = Outcome.error("TIMEOUT", text)
        return [replace(outcome, cost_usd=usage.cost_usd)]

    async def _ask(self, messages: list[dict[str, str]], usage: _Usage) -> Outcome:
        """Ask until there is a grade, the tries are used up, or the time is. Raises TimeoutError."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._timeout
        body = {
            "model": self._judge.model,
            "messages": messages,
            "temperature": self._judge.temperature,
            "max_tokens": self._judge.max_tokens,
        }
        for number in range(1, self._judge.tries + 1):
            wait = random.uniform(0.5, 1.5) * min(_FIRST_WAIT_SECONDS * 2 ** (number - 1), _LONGEST_WAIT_SECONDS)
            try:
                response = await self._client.post(body, timeout=max(deadline - loop.time(), 0))
                return self._graded(response, body, usage)
            except WebError as error:
                failure = Outcome.error(error.reason, str(error))
                if not error.again:
                    break
                wait = max(wait, error.retry_after)
            except ValueError as error:
                failure = Outcome.error("BAD_VERDICT", f"the verdict of {self._judge.model} has {error}")
                wait = 0.0  # the endpoint works
            if number == self._judge.tries or loop.time() + wait >= deadline:
                break
            await asyncio.sleep(wait)
        return failure

    def _graded(self, response: Mapping[str, Any], body: Mapping[str, Any], usage: _Usage) -> Outcome:
        """Return the outcome of a response, and count its tokens.

        Raises:
            WebError: the response is none of this API.
            ValueError: the verdict has no grade.
        """
        choices = response.get("choices")
        choice = choices[0] if isinstance(choices, list) and choices else None
        message = choice.get("message") if isinstance(choice, dict) else None
        verdict = message.get("content") if isinstance(message, dict) else None
        self._count(response.get("usage"), body, verdict, usage)
        if not isinstance(verdict, str):
            text = f"{self._client.title} sent a response without choices[0].message.content"
            raise WebError("BAD_RESPONSE", text, again=True)
        verdict = self._client.redact(verdict)  # before errors quote parts of it
        try:
            grade, score = self._pattern.find(verdict)
        except ValueError as error:
            assert isinstance(choice, dict)
            cut = "; it was cut off: raise reward.judge.max_tokens" if choice.get("finish_reason") == "length" else ""
            raise ValueError(f"{error}{cut}. It ends with {verdict[-_VERDICT_SHOWN:]!r}") from None
        counts = {
            "prompt_tokens": float(usage.prompt_tokens),
            "completion_tokens": float(usage.completion_tokens),
        }
        return Outcome(score=score, components={"grade": grade, **counts})

    def _count(self, reported: Any, body: Mapping[str, Any], verdict: Any, usage: _Usage) -> None:
        """Add tokens and costs of one response. An endpoint without a plausible count gets 4 bytes per token."""
        reported = reported if isinstance(reported, dict) else {}
        texts = {
            "prompt": "".join(message["content"] for message in body["messages"]),
            "completion": verdict if isinstance(verdict, str) else "",
        }
        counts = dict[str, int]()
        for name, text in texts.items():
            count = reported.get(f"{name}_tokens")
            plausible = isinstance(count, int) and not isinstance(count, bool) and 0 <= count <= _MAX_TOKENS
            counts[name] = count if plausible else -(-len(text.encode(errors="replace")) // _BYTES_PER_TOKEN)
        prices = self._judge.input_usd_per_million, self._judge.output_usd_per_million
        cost = (counts["prompt"] * prices[0] + counts["completion"] * prices[1]) / 1e6
        usage.prompt_tokens += counts["prompt"]
        usage.completion_tokens += counts["completion"]
        usage.cost_usd += cost
        self.tokens.update(counts)
        self.cost_usd += cost


def _authorization(variable: str) -> dict[str, str]:
    """Return the header with the key. Raises ConfigError: the variable is missing, or is no header."""
    if not variable:
        return {}
    key = os.environ.get(variable, "").strip()
    if not key:
        raise ConfigError(
            f"reward.judge.api_key_env = {variable!r}, and the environment has no such variable; set it here"
        )
    if not key.isascii() or not key.isprintable():
        raise ConfigError(f"the key in the environment variable {variable!r} has characters that no header may have")
    return {"Authorization": f"Bearer {key}"}
