"""An agent that needs only the `openai` package: takes tasks of a run, answers them, and closes them with a reward.

    python examples/agent_openai.py http://127.0.0.1:8000/v1 20

It needs a run with `agents.source = "tasks"` and a gateway with HTTP. The key is read from OPENAI_API_KEY; without TLS
any word will do. The reward is 1 when the reference answer is in the text of the model.
"""

from __future__ import annotations

import os
import sys
import uuid
from typing import Any

from openai import APIError, OpenAI


def attempt(client: OpenAI, task: dict[str, Any]) -> float:
    """Play one task in a session of its own; return the reward."""
    session_id = uuid.uuid4().hex
    body = {"session_id": session_id, "task_id": task["task_id"]}
    opened: Any = client.post("/sessions", cast_to=object, body=body)
    # The key of the session is all that a framework needs: whatever it samples with the key belongs to the session.
    model = client.with_options(api_key=opened["session_key"])
    outcome: dict[str, Any] = {"abandon_reason": "AGENT_ERROR"}
    try:
        messages: Any = task["messages"] or [{"role": "user", "content": task["text"]}]
        answer = model.chat.completions.create(
            model="policy", messages=[{"role": m["role"], "content": m["content"]} for m in messages], max_tokens=64
        )
        outcome = {"reward": float(task["answer"] in (answer.choices[0].message.content or ""))}
    finally:
        client.post(f"/sessions/{session_id}/close", cast_to=object, body=outcome)
    return float(outcome["reward"])


def main(url: str, count: int) -> None:
    """Attempt `count` tasks."""
    client = OpenAI(base_url=url, api_key=os.environ.get("OPENAI_API_KEY", "none"), timeout=120)
    done = 0
    while done < count:
        leased: Any = client.post("/tasks/next", cast_to=object, body={"wait": "10s"})
        if "task" in leased:  # otherwise no task came in time
            done += 1
            sys.stdout.write(f"{leased['task']['task_id']}: {attempt(client, leased['task'])}\n")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python examples/agent_openai.py URL COUNT")
    try:
        main(sys.argv[1], int(sys.argv[2]))
    except APIError as error:
        sys.exit(f"agent: {error}")
