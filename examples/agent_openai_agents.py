"""An agent of the OpenAI Agents SDK: its own tool loop, unchanged except for the base URL and the key.

    pip install openai-agents
    python examples/agent_openai_agents.py http://127.0.0.1:8000/v1

It is for a run such as recipes/agents_framework.toml, and ends when the run has no more tasks. The key is read from
OPENAI_API_KEY; without TLS any word will do. The reward is 1 for the right answer, 0.3 for a valid call of the tool.
"""

from __future__ import annotations

import asyncio
import os
import re
import sys
import uuid
from dataclasses import dataclass
from typing import Any, Final

from agents import (
    Agent,
    AgentsException,
    MaxTurnsExceeded,
    OpenAIProvider,
    RunConfig,
    RunContextWrapper,
    Runner,
    function_tool,
)
from agents.items import ToolCallItem
from openai import APIError, APIStatusError, AsyncOpenAI, DefaultAsyncHttpxClient

# Tasks at a time. An engine samples many turns in little more time than one.
_WORKERS: Final = 32
_TURNS: Final = 2
# The chat template of SmolLM2 does not render tools, so an example of a call stands before each problem.
_EXAMPLE: Final = (
    {
        "role": "user",
        "content": "Solve the following multiplication: 12 * 34. Give only the result as your final answer.",
    },
    {
        "role": "assistant",
        "content": '<tool_call>{"name": "multiply", "arguments": {"a": 12, "b": 34}}</tool_call>',
    },
)


@dataclass
class Attempt:
    """What happened in one attempt."""

    calls: int = 0
    valid: int = 0  # calls that ran
    right: bool = False


@function_tool
def multiply(context: RunContextWrapper[Attempt], a: int, b: int) -> int:
    """Multiplies two numbers."""
    context.context.valid += 1
    return a * b


CALCULATOR: Final[Agent[Attempt]] = Agent(
    name="calculator", instructions="Call the tool to multiply, then reply with its result.", tools=[multiply]
)


async def solve(problem: str, answer: str, client: AsyncOpenAI) -> Attempt:
    """Have the SDK solve one problem with a client."""
    found = Attempt()
    provider = OpenAIProvider(openai_client=client)
    config = RunConfig(model_provider=provider, tracing_disabled=True)  # traces go to OpenAI
    messages: Any = [*_EXAMPLE, {"role": "user", "content": problem}]
    try:
        result = await Runner.run(CALCULATOR, messages, context=found, max_turns=_TURNS, run_config=config)
        items, text = result.new_items, str(result.final_output)
        found.right = re.findall(r"-?\d+", text)[-1:] == [answer]
        found.calls = "<tool_call>" in text  # in a form that no parser reads
    except AgentsException as error:
        items = error.run_data.new_items if error.run_data else []
        # Otherwise the model called an unknown tool, or the limit of tokens cut a turn off: both count as wrong calls.
        found.calls = not isinstance(error, MaxTurnsExceeded)
    found.calls += sum(isinstance(item, ToolCallItem) for item in items)
    return found


async def attempt(client: AsyncOpenAI, task: dict[str, Any]) -> Attempt:
    """Play one task in a session of its own."""
    session_id = uuid.uuid4().hex
    body = {"session_id": session_id, "task_id": task["task_id"]}
    opened: Any = await client.post("/sessions", cast_to=object, body=body)
    problem = task["messages"][-1]["content"] if task["messages"] else task["text"]
    outcome: dict[str, Any] = {"abandon_reason": "AGENT_ERROR"}
    try:
        # The key of the session is all that the SDK needs: whatever it samples with the key belongs to the session.
        found = await solve(problem, task["answer"], client.with_options(api_key=opened["session_key"]))
        metrics = {"right": found.right, "tool_calls": found.calls, "tool_calls_valid": found.valid}
        outcome = {"reward": 1.0 if found.right else 0.3 * (found.valid > 0), "metrics": metrics}
    finally:
        await client.post(f"/sessions/{session_id}/close", cast_to=object, body=outcome)
    return found


async def work(client: AsyncOpenAI, found: list[Attempt]) -> None:
    """Play tasks until the run has no more."""
    while True:
        try:
            leased: Any = await client.post("/tasks/next", cast_to=object, body={"wait": "10s"})
        except APIStatusError as error:
            if error.code == "run_ended":
                return
            raise
        if "task" not in leased:  # none came within 10 s
            continue
        try:
            found.append(await attempt(client, leased["task"]))
        except APIError as error:  # the session expired, or the run took the task back; other tasks go on
            sys.stderr.write(f"task {leased['task']['task_id']}: {error}\n")


async def main(url: str) -> None:
    """Play all tasks; print the share of valid tool calls."""
    # The client repeats a call that fails while the run starts: for half a minute with so many retries.
    key = os.environ.get("OPENAI_API_KEY", "none")
    # A gateway is not behind the proxy that http_proxy names. `trust_env=False` would also forget SSL_CERT_FILE.
    http = DefaultAsyncHttpxClient(mounts={"http://": None, "https://": None})
    client = AsyncOpenAI(base_url=url, api_key=key, timeout=120, max_retries=8, http_client=http)
    found = list[Attempt]()
    async with asyncio.TaskGroup() as group:
        for _ in range(_WORKERS):
            group.create_task(work(client, found))
    calls, valid = sum(each.calls for each in found), sum(each.valid for each in found)
    sys.stdout.write(f"{len(found)} tasks, {valid} of {calls} tool calls valid\n")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python examples/agent_openai_agents.py URL")
    try:
        asyncio.run(main(sys.argv[1]))
    except* APIError as errors:
        sys.exit(f"agent: {errors.exceptions[0]}")
    except* KeyboardInterrupt:
        sys.exit(130)
