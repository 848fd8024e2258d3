"""Runs environments of the library verifiers: it calls the model through the HTTP API of the gateway's session.

The tasks are those of the run's data: `prompt`, `answer` and `info` of a verifiers row are the messages, the answer and
the metadata of the task. The library's own rubric gives the reward.
"""

from __future__ import annotations

import zlib
from typing import Any

from fourfold_reward.environment import wire
from fourfold_reward.environment.adapters import Factory
from fourfold_reward.environment.protocol import Done, Endpoint, Message, Task
from fourfold_reward.environment.spec import EnvironmentSpec


def load(spec: EnvironmentSpec) -> Factory:
    """Load the environment named `environment.source` once for the process.

    Raises ImportError: verifiers is not installed, with the command that installs it.
    """
    try:
        import openai
        import verifiers
        import verifiers.clients
    except ImportError as error:
        raise ImportError(
            f'environment.kind = "verifiers" needs the package verifiers ({error}): '
            f"pip install 'fourfold-reward[verifiers]'"
        ) from None
    environment: Any = verifiers.load_environment(spec.source, **spec.options)

    def client(endpoint: Endpoint) -> Any:
        connection = openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key, max_retries=5)
        return verifiers.clients.OpenAIChatCompletionsClient(connection)

    return Factory(make=lambda: VerifiersAgent(environment, client), is_agent=True)


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
