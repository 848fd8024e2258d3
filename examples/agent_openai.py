"""An agent that needs only the `openai` package: takes tasks of a run, answers them, and closes them with a reward.

    python examples/agent_openai.py http://127.0.0.1:8000/v1

It is for a run such as recipes/agents_external.toml, and ends when the run has no more tasks. The key is read from
OPENAI_API_KEY; without TLS any word will do. The reward is 1 when the last number of the answer is the right one.
"""

from __future__ import annotations

import asyncio
import os
import re
import sys
import uuid
from typing import Any, Final

from openai import APIError, APIStatusError, AsyncOpenAI, DefaultAsyncHttpxClient

# Tasks at a time. An engine samples many turns in little more time than one.
_WORKERS: Final = 32


async def attempt(client: AsyncOpenAI, task: dict[str, Any]) -> float:
    """Play one task in a session of its own; return the reward."""
    session_id = uuid.uuid4().hex
    body = {"session_id": session_id, "task_id": task["task_id"]}
    opened: Any = await client.post("/sessions", cast_to=object, body=body)
    # The key of the session is all that a framework needs: whatever it samples with the key belongs to the session.
    model = client.with_options(api_key=opened["session_key"])
    outcome: dict[str, Any] = {"abandon_reason": "AGENT_ERROR"}
    try:
        messages: Any = task["messages"] or [{"role": "user", "content": task["text"]}]
        answer = await model.chat.completions.create(
            model="policy", messages=[{"role": m["role"], "content": m["content"]} for m in messages], max_tokens=64
        )
        numbers = re.findall(r"-?\d+", answer.choices[0].message.content or "")
        outcome = {"reward": float(numbers[-1:] == [task["answer"]])}
    finally:
        await client.post(f"/sessions/{session_id}/close", cast_to=object, body=outcome)
    return float(outcome["reward"])


async def work(client: AsyncOpenAI, rewards: list[float]) -> None:
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
            rewards.append(await attempt(client, leased["task"]))
        except APIError as error:  # the session expired, or the run took the task back; other tasks go on
            sys.stderr.write(f"task {leased['task']['task_id']}: {error}\n")


async def main(url: str) -> None:
    """Play all tasks; print the mean reward."""
    # The client repeats a call that fails while the run starts: for half a minute with so many retries.
    key = os.environ.get("OPENAI_API_KEY", "none")
    # A gateway is not behind the proxy that http_proxy names. `trust_env=False` would also forget SSL_CERT_FILE.
    http = DefaultAsyncHttpxClient(mounts={"http://": None, "https://": None})
    client = AsyncOpenAI(base_url=url, api_key=key, timeout=120, max_retries=8, http_client=http)
    rewards: list[float] = []
    async with asyncio.TaskGroup() as group:
        for _ in range(_WORKERS):
            group.create_task(work(client, rewards))
    sys.stdout.write(f"{len(rewards)} tasks, mean reward {sum(rewards) / max(len(rewards), 1):.3f}\n")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python examples/agent_openai.py URL")
    try:
        asyncio.run(main(sys.argv[1]))
    except* APIError as errors:
        sys.exit(f"agent: {errors.exceptions[0]}")
    except* KeyboardInterrupt:
        sys.exit(130)
