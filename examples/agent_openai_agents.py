"""An agent of the OpenAI Agents SDK: its own tool loop, unchanged except for the base URL and the key.

    pip install openai-agents
    python examples/agent_openai_agents.py http://127.0.0.1:8000/v1

It is for a run such as recipes/agents_framework.toml, and ends when the run has no more tasks. The key is read from
OPENAI_API_KEY; without TLS any word will do. The reward is 1 for the right answer, 0.2 for a valid call of the tool.
"""

from __future__ import annotations

import asyncio
import os
import re
import sys
import uuid
from dataclasses import dataclass
from typing import Any, Final, Literal

from agents import (
    Agent,
    AgentsException,
    ModelSettings,
    OpenAIChatCompletionsModel,
    RunContextWrapper,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from agents.items import ToolCallItem
from openai import APIError, AsyncOpenAI, BadRequestError

# Tasks at a time. An engine samples many turns in little more time than one.
_WORKERS: Final = 32
_TURNS: Final = 3
# The chat template of SmolLM2 does not render tools, so the instructions describe the one that there is.
_INSTRUCTIONS: Final = """\
Use the calculator, then reply with only the final answer. Call it like this:
<tool_call>
{"name": "calculate", "arguments": {"operation": "multiply", "a": 12, "b": 34}}
</tool_call>"""


@dataclass
class Attempt:
    """What happened in one attempt."""

    calls: int = 0
    valid: int = 0
    answer: str = ""


@function_tool
def calculate(
    context: RunContextWrapper[Attempt], operation: Literal["add", "subtract", "multiply"], a: float, b: float
) -> str:
    """Calculates with two numbers.

    Args:
        operation: what to do
        a: first number
        b: second number
    """
    context.context.valid += 1
    result = {"add": a + b, "subtract": a - b, "multiply": a * b}[operation]
    return f"{result:g}" if abs(result) < 1e6 else str(result)


def policy(client: AsyncOpenAI) -> Agent[Attempt]:
    """Return the agent whose model is the policy of the run."""
    # A grammar in the engine makes the first turn a valid call: a model of this size writes none by itself. The SDK
    # leaves the choice to the model after the first call.
    return Agent(
        name="calculator",
        instructions=_INSTRUCTIONS,
        tools=[calculate],
        model=OpenAIChatCompletionsModel(model="policy", openai_client=client),
        model_settings=ModelSettings(tool_choice="required"),
    )


async def attempt(client: AsyncOpenAI, task: dict[str, Any]) -> Attempt:
    """Play one task in a session of its own."""
    session_id, found = uuid.uuid4().hex, Attempt()
    body = {"session_id": session_id, "task_id": task["task_id"]}
    opened: Any = await client.post("/sessions", cast_to=object, body=body)
    # The key of the session is all that the framework needs: whatever it samples with the key belongs to the session.
    agent = policy(client.with_options(api_key=opened["session_key"]))
    problem = task["messages"][-1]["content"] if task["messages"] else task["text"]
    outcome: dict[str, Any] = {"abandon_reason": "AGENT_ERROR"}
    try:
        try:
            result = await Runner.run(agent, problem, context=found, max_turns=_TURNS)
            found.calls = sum(isinstance(item, ToolCallItem) for item in result.new_items)
            found.answer = str(result.final_output)
        except AgentsException as error:  # a call of an unknown tool, or no answer after the last turn
            items = error.run_data.new_items if error.run_data else []
            found.calls = max(sum(isinstance(item, ToolCallItem) for item in items), 1)
        right = re.findall(r"-?\d+", found.answer)[-1:] == [task["answer"]]
        metrics = {"right": float(right), "tool_calls": found.calls, "tool_calls_valid": min(found.valid, found.calls)}
        outcome = {"reward": 1.0 if right else 0.2 * (found.valid > 0), "metrics": metrics}
    finally:
        await client.post(f"/sessions/{session_id}/close", cast_to=object, body=outcome)
    return found


async def work(client: AsyncOpenAI, found: list[Attempt]) -> None:
    """Play tasks until the run has no more."""
    while True:
        try:
            leased: Any = await client.post("/tasks/next", cast_to=object, body={"wait": "10s"})
        except BadRequestError as error:
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
    set_tracing_disabled(True)
    # The client repeats a call that fails while the run starts: for half a minute with so many retries.
    key = os.environ.get("OPENAI_API_KEY", "none")
    client, found = AsyncOpenAI(base_url=url, api_key=key, timeout=120, max_retries=8), list[Attempt]()
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
