"""Scores samples with a reward server of OpenRLHF: `[reward] http = "http://127.0.0.1:5000/get_reward"`.

    {"query": [prompt + completion, ...], "prompts": [prompt, ...], "labels": [answer, ...]}
    {"rewards": [number, ...], "scores": [number, ...], "extra_logs": {name: [number, ...]}}

The format is that of `openrlhf.cli.serve_rm` and of its clients (OpenRLHF 0.5 to 0.11). Only `rewards` is required in a
response: servers before 0.8.4 send nothing else. `scores` and the numbers of `extra_logs` become components.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from fourfold.reward.function import Score
from fourfold_reward.columns import parse_metadata, take_answer
from fourfold_reward.job import Job
from fourfold_reward.protocol import NO_SCORE, Outcome, outcome_of
from fourfold_reward.sample_queue import SlotScorer
from fourfold_reward.scorers.web import JsonClient, WebError
from fourfold_reward.scores import InvalidSample, components_of
from fourfold_reward.signatures import Reads

BATCH: Final = 32
REQUESTS: Final = 8
"""Requests at the same time, each with up to BATCH samples."""
_MAX_BYTES: Final = 1 << 20
# Time for single requests beyond the limit of a sample, after a request of several took all of it. It is less than what
# the coordinator adds to that limit (10 s), so that the scores of the good samples arrive before its deadline.
_SINGLE_SECONDS: Final = 5.0
_SINGLE: Final = frozenset({"BAD_RESPONSE", "OVERLOADED", "TIMEOUT"})


class OpenRlhfServer(SlotScorer):
    """A backend; see `fourfold_reward.backend.Backend`."""

    def __init__(self, url: str, *, timeout_seconds: float, on_failure: Callable[[str], None]) -> None:
        """Raises ConfigError: the address is malformed."""
        # A request of several samples that fails is repeated with one sample per request.
        self._client = JsonClient(url, key="reward.http", connections=BATCH * REQUESTS, max_bytes=_MAX_BYTES)
        self._timeout = timeout_seconds
        super().__init__(slots=REQUESTS, batch=BATCH, on_failure=on_failure)
        self.reads = Reads()

    @property
    def scorer(self) -> str:
        """Address and format; the format has no version of the model."""
        return f"{self._client.title}@openrlhf"

    async def start(self) -> None:
        """Open the client. The server may start later: until then, samples have errors. Raises ConfigError."""
        self._client.start()
        self.start_slots()

    async def close(self) -> None:
        await super().close()
        await self._client.close()

    async def score_batch(self, jobs: Sequence[Job]) -> Sequence[Outcome]:
        loop = asyncio.get_running_loop()
        end = loop.time() + self._timeout + _SINGLE_SECONDS
        outcomes = await self._request(jobs, self._timeout)
        failed = outcomes[0].error_reason
        if len(jobs) > 1 and failed in _SINGLE and all(outcome.error_reason == failed for outcome in outcomes):
            # One sample may be the cause for all: a server that hangs or fails on it fails the whole request.
            seconds = min(self._timeout, end - loop.time())
            return [outcome for (outcome,) in await asyncio.gather(*(self._request([job], seconds) for job in jobs))]
        return outcomes

    async def _request(self, jobs: Sequence[Job], seconds: float) -> list[Outcome]:
        body = {
            "query": [job.prompt + job.completion for job in jobs],
            "prompts": [job.prompt for job in jobs],
            "labels": [_label(job) for job in jobs],
        }
        try:
            return _outcomes(await self._client.post(body, timeout=seconds), len(jobs))
        except WebError as error:
            return [Outcome.error(error.reason, str(error))] * len(jobs)
        except TimeoutError:
            text = f"{self._client.title} took longer than {seconds:.3g} s; raise reward.timeout_seconds"
            return [Outcome.error("TIMEOUT", text)] * len(jobs)
        except ValueError as error:
            return [Outcome.error("BAD_RESPONSE", f"{self._client.title} sent {error}")] * len(jobs)


def _label(job: Job) -> Any:
    """Return the reference answer as the data has it; an empty text if the task has none."""
    try:
        value = take_answer(parse_metadata(job.metadata_json), job.answer)
        return "" if value is None else value
    except InvalidSample:  # the server gets nothing else of the metadata
        return job.answer


def _outcomes(response: Mapping[str, Any], count: int) -> list[Outcome]:
    """Return one outcome per sample. Raises ValueError: the response has not one reward for each."""
    rewards = response.get("rewards")
    if isinstance(rewards, int | float) and not isinstance(rewards, bool) and count == 1:
        rewards = [rewards]
    if not isinstance(rewards, list):
        raise ValueError(f"no list of rewards; its keys are {', '.join(map(repr, list(response)[:5])) or 'none':.200}")
    if len(rewards) != count:
        raise ValueError(f"{len(rewards)} rewards for {count} samples")
    logs = response.get("extra_logs")
    # Values that are not numbers are left out: the run has no log for them.
    series = {"scores": response.get("scores")} | (dict(logs) if isinstance(logs, Mapping) else {})
    return [
        _outcome(_only(reward), components_of({name: _at(values, index, count) for name, values in series.items()}))
        for index, reward in enumerate(rewards)
    ]


def _outcome(reward: Any, components: Mapping[str, float]) -> Outcome:
    if reward is None:
        return Outcome(abstain_reason=NO_SCORE)
    if isinstance(reward, bool):
        return Outcome.error("NOT_A_NUMBER", f"the reward is {reward}; it must be a number")
    return outcome_of(Score(reward, components))


def _only(value: Any) -> Any:
    """Return the number in a list of one, as a model with one label sends it."""
    return value[0] if isinstance(value, list) and len(value) == 1 else value


def _at(values: Any, index: int, count: int) -> Any:
    """Return the value of one of `count` samples; a value that is not a list of so many is that of all."""
    return _only(values[index]) if isinstance(values, list) and len(values) == count else values
