"""Agents as OpenRLHF documents them; a test runs this file as it is."""

from typing import Any

import numpy as np
from openrlhf.utils.agent import (  # type: ignore[import-not-found]
    AgentExecutorBase,
    AgentInstanceBase,
    MultiTurnAgentExecutor,
)


class AgentInstance(AgentInstanceBase):  # type: ignore[misc]
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.turns = 0

    async def reset(self, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        return {"observation": states["observation"]}

    async def step(self, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        assert states["observation_text"] and states["action_text"] and states["label"] == "2"
        self.turns += 1
        reward = np.array([float(self.turns)])
        return {
            "rewards": reward,
            "scores": reward,
            "environment_feedback": "\nTry again: ",
            "done": self.turns == 2,
            "sampling_params": states.get("sampling_params"),
            "extra_logs": {"dummy_scores": reward},
        }


class AgentExecutor(MultiTurnAgentExecutor):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__(AgentInstance)


class ReadmeInstance(AgentInstance):
    async def __init__(self, *args: Any, **kwargs: Any) -> None:  # type: ignore[misc]
        """Do as the class in OpenRLHF's README, which Python alone refuses to call."""
        self.turns = 0


class ReadmeExecutor(MultiTurnAgentExecutor):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__(ReadmeInstance)


class OwnExecutor(AgentExecutorBase):  # type: ignore[misc]
    async def execute(
        self,
        prompt: str,
        label: str,
        sampling_params: Any,
        max_length: int,
        hf_tokenizer: Any,
        llm_engine: Any,
        images: Any = None,
    ) -> dict[str, Any]:
        first = await llm_engine.generate(list(map(ord, prompt)), sampling_params)
        assert first.outputs[0].text == "abc" and first.outputs[0].finish_reason == "stop"
        second = await llm_engine.generate([ord("7"), *first.outputs[0].token_ids], sampling_params)
        count = len(first.outputs[0].token_ids) + len(second.outputs[0].token_ids)
        return {"prompt": prompt, "label": label, "reward": float(count), "scores": 1.0, "extra_logs": {}}
