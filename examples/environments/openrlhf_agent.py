"""An agent file of OpenRLHF: the model multiplies, and is asked once more if its reply has no number.

OpenRLHF runs it with `--train.agent_func_path`. A recipe of Fourfold names a class of it:
`source = "examples/environments/openrlhf_agent.py:AgentExecutor"`; see recipes/agents_openrlhf.toml.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor  # type: ignore[import-not-found]

# OpenRLHF adds text to the conversation as it is, so the file writes the chat template of its model (ChatML).
ASK_AGAIN = "\n<|im_start|>user\nReply with a number.<|im_end|>\n<|im_start|>assistant\n"
MAX_TURNS = 2


class AgentInstance(AgentInstanceBase):  # type: ignore[misc]
    """One conversation. OpenRLHF makes an object for each sample."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Start before the first turn."""
        self.turns = 0

    async def reset(self, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """Return the prompt, which `observation` has with the chat template applied."""
        return {"observation": states["observation"]}

    async def step(self, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """Compare the last number of the reply with the label."""
        self.turns += 1
        numbers = re.findall(r"\d+", states["action_text"])
        right = bool(numbers) and int(numbers[-1]) == int(states["label"])
        reward = torch.tensor(float(right))
        done = bool(numbers) or self.turns == MAX_TURNS
        return {
            "rewards": reward,
            "scores": reward,
            "environment_feedback": "" if done else ASK_AGAIN,
            "done": done,
            "sampling_params": states.get("sampling_params"),
            "extra_logs": {"turns": torch.tensor(float(self.turns))},
        }


class AgentExecutor(MultiTurnAgentExecutor):  # type: ignore[misc]
    """The name that OpenRLHF looks for in the file."""

    def __init__(self) -> None:
        """Name the class of the conversations."""
        super().__init__(AgentInstance)
