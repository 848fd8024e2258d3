"""Runs environments of the library verifiers: it calls the model through the HTTP API of the gateway's session.

The tasks are those of the run's data: `prompt`, `answer` and `info` of a verifiers row are the messages, the answer and
the metadata of the task. The library's own rubric gives the reward.
"""

from __future__ import annotations

import contextlib
import signal
import zlib
from collections.abc import Iterator
from typing import Any

from fourfold.install import install_command
from fourfold_reward.environment import wire
from fourfold_reward.environment.adapters import Factory
from fourfold_reward.environment.protocol import Done, Endpoint, Message, Task
from fourfold_reward.environment.spec import EnvironmentSpec


def load(spec: EnvironmentSpec) -> Factory:
    """Load the environment named `environment.source` once for the process.

    Raises ImportError: verifiers is not installed or too new, with the command that installs it.
    """
    try:
        import openai
        import verifiers
        from verifiers.clients import OpenAIChatCompletionsClient
    except ImportError as error:
        raise ImportError(
            f'environment.kind = "verifiers" needs the package verifiers below 0.4, which removed load_environment '
            f"({error}): {install_command('fourfold-reward[verifiers]')}"
        ) from None
    with _no_signal_handlers():
        environment: Any = verifiers.load_environment(spec.source, **spec.options)
    # Copies share its connections. A new client reads the trusted certificates, which takes 40 ms of CPU.
    http = openai.DefaultAsyncHttpxClient(mounts={"http://": None, "https://": None})  # the gateway needs no proxy
    shared = openai.AsyncOpenAI(base_url="http://127.0.0.1", api_key="none", max_retries=5, http_client=http)

    def client(endpoint: Endpoint) -> Any:
        session = shared.with_options(base_url=endpoint.base_url, api_key=endpoint.api_key)
        return OpenAIChatCompletionsClient(session)

    return Factory(make=lambda: VerifiersAgent(environment, client), is_agent=True)


@contextlib.contextmanager
def _no_signal_handlers() -> Iterator[None]:
    """Ignore calls of `signal.signal`.

    Environments of verifiers set handlers in their constructor. Python refuses that in the threads in which workers
    load, and the service ends a worker with SIGKILL.
    """
    set_handler = signal.signal
    signal.signal = lambda signalnum, handler: signal.SIG_DFL
    try:
        yield
    finally:
        signal.signal = set_handler


class VerifiersAgent:
    """One rollout of a verifiers environment."""

    def __init__(self, environment: Any, client: Any) -> None:
        """Take the environment, and a function that makes its client from an Endpoint."""
        self._environment, self._client = environment, client

    async def run(self, task: Task, endpoint: Endpoint) -> Done:
        """Make the rollout and return the reward of the rubric.

        Raises RuntimeError: the environment reports an error of the rollout.
        """
        row = {
            "prompt": [_row(message) for message in task.prompt],
            "answer": task.answer,
            "info": dict(task.metadata),
            "example_id": zlib.crc32(task.group_id.encode()),
        }
        result = await self._environment.run_rollout(row, self._client(endpoint), endpoint.model, {})
        if result.get("error"):
            raise RuntimeError(f"verifiers reports: {result['error']}")
        metrics = {k: v for k, v in (result.get("metrics") or {}).items() if isinstance(v, int | float)}
        kept = dict(sorted(metrics.items())[: wire.MAX_METRICS])
        return Done(float(result["reward"]), metrics=kept, truncated=bool(result.get("is_truncated")))


def _row(message: Message) -> dict[str, Any]:
    return {"role": message.role, "content": message.content}
