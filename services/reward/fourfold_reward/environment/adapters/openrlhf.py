"""Runs agent files of OpenRLHF: a class `AgentInstance` with reset and step, or an `AgentExecutor` with execute.

The files import `openrlhf.utils.agent`. OpenRLHF itself needs Ray, vLLM and flash-attn, so this module supplies that
module's four classes. Text goes on without a chat template, and the tokens of earlier turns stay as they were sampled,
as in OpenRLHF.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import functools
import inspect
import sys
import types
from collections.abc import Awaitable, Mapping
from types import MappingProxyType, SimpleNamespace
from typing import Any, Final

from fourfold.errors import FourfoldError
from fourfold.install import install_command
from fourfold.model import folder as model_folder
from fourfold_reward import openrlhf_modules
from fourfold_reward.environment.adapters import Factory
from fourfold_reward.environment.protocol import Action, Done, Observation, RawText, Task, TokenIds
from fourfold_reward.environment.spec import EnvironmentSpec, load_object
from fourfold_reward.loader import VerifierError

_AGENT_MODULE: Final = "openrlhf.utils.agent"


class AgentInstanceBase:
    """Base of OpenRLHF's environments."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Take any arguments."""

    async def reset(self, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """Return the first observation, here the prompt."""
        return states

    async def step(self, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """Take the model's turn."""
        raise TypeError(f"{type(self).__name__} defines no step")


class AgentExecutorBase:
    """Base of OpenRLHF's programs that call the engine themselves."""

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
        """Make one trajectory."""
        raise TypeError(f"{type(self).__name__} defines no execute")


class MultiTurnAgentExecutor(AgentExecutorBase):
    """Names the environment of a file; the service runs its turns."""

    def __init__(self, agent_instance_cls: type[Any]) -> None:
        """Keep the class."""
        self.agent_instance_cls = agent_instance_cls


class SingleTurnAgentExecutor(AgentExecutorBase):
    """One turn, which the run's reward service scores."""

    def __init__(self, remote_rm_url: Any = None) -> None:
        """Ignore the address of OpenRLHF's reward server."""

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
        """Sample one turn."""
        ids = hf_tokenizer(prompt, add_special_tokens=False)["input_ids"]
        await llm_engine.generate(list(ids), sampling_params)
        return {"reward": None, "extra_logs": {}}


def load(spec: EnvironmentSpec) -> Factory:
    """Load an agent file, with the class that `environment.source` names.

    Raises VerifierError: the class is neither an instance nor an executor.
    """
    _provide_modules()
    found, _ = load_object(spec.file or {})
    if isinstance(found, type) and issubclass(found, AgentExecutorBase):
        if found.execute is not AgentExecutorBase.execute:
            tokenizer = _Tokenizer(spec)  # of all episodes: to read a small one takes 0.8 s
            return Factory(make=lambda: ExecutorEpisode(found(**spec.options), spec, tokenizer), wants_text=True)
        instance: Any = getattr(found(**spec.options), "agent_instance_cls", None)
        if instance is None:
            raise VerifierError(f"{spec.source} defines neither execute nor an AgentInstance")
        return Factory(make=lambda: InstanceEpisode(instance, spec), wants_text=True)
    if not hasattr(found, "step"):
        raise VerifierError(f"{spec.source} is {found!r:.100}; name the AgentInstance or the AgentExecutor of the file")
    return Factory(make=lambda: InstanceEpisode(found, spec, spec.options), wants_text=True)


def _provide_modules() -> None:
    """Make `openrlhf.utils.agent` importable; an installed OpenRLHF keeps its other modules."""
    openrlhf_modules.provide()
    module: Any = types.ModuleType(_AGENT_MODULE)
    for base in (AgentInstanceBase, AgentExecutorBase, MultiTurnAgentExecutor, SingleTurnAgentExecutor):
        setattr(module, base.__name__, base)
    sys.modules[_AGENT_MODULE] = module


def _sampling_params(spec: EnvironmentSpec) -> SimpleNamespace:
    # Attributes of vLLM's SamplingParams that agent files read. The recipe decides about the distribution.
    return SimpleNamespace(
        temperature=spec.temperature, max_tokens=spec.max_new_tokens,
        n=1, top_p=1.0, top_k=-1, min_p=0.0, min_tokens=0, logprobs=None, stop=None, seed=None,
    )  # fmt: skip


class InstanceEpisode:
    """One episode of an `AgentInstance`."""

    def __init__(self, cls: Any, spec: EnvironmentSpec, options: Mapping[str, Any] = MappingProxyType({})) -> None:
        """Make the file's object. `reset` finishes an `async def __init__`, as OpenRLHF's README has it."""
        self._starting: Awaitable[None] | None = None
        if inspect.iscoroutinefunction(getattr(cls, "__init__", None)):  # Python refuses to call such a class
            self._instance = cls.__new__(cls)
            self._starting = self._instance.__init__(**options)
        else:
            self._instance = cls(**options)
        self._spec = spec
        self._label: Any = ""
        self._text = ""
        self._reward = 0.0
        self._logs: dict[str, float] = {}

    async def reset(self, task: Task) -> Observation:
        """Return the observation of the instance as raw text."""
        if self._starting is not None:
            await self._starting
        self._label = _label(task)
        states = {"observation": task.text, "label": self._label}
        result = await _value(self._instance.reset(states))
        self._text = str(result["observation"])
        return Observation(RawText(self._text))

    async def step(self, action: Action) -> Observation | Done:
        """Give the instance the text so far and the model's turn; add up the rewards."""
        states = {
            "observation_text": self._text,
            "action_text": action.text,
            "label": self._label,
            "sampling_params": _sampling_params(self._spec),
        }
        result = await _value(self._instance.step(states))
        self._reward += float(result["rewards"])
        self._logs = _numbers({"scores": result.get("scores"), **(result.get("extra_logs") or {})})
        if result["done"]:
            return Done(self._reward, metrics=self._logs)
        feedback = str(result["environment_feedback"])
        self._text += action.text + feedback
        return Observation(RawText(feedback))

    def truncate(self) -> Done:
        """Return the sum of the rewards, as OpenRLHF does at its limit of tokens."""
        return Done(self._reward, metrics=self._logs, truncated=True)


class ExecutorEpisode:
    """One episode of an `AgentExecutor`, whose `execute` asks for the turns instead of being asked.

    `reset` starts `execute` and returns its first prompt. `step` returns from its `generate`, and waits for the next.
    """

    def __init__(self, executor: Any, spec: EnvironmentSpec, tokenizer: _Tokenizer) -> None:
        """Wrap the file's executor."""
        self._executor, self._spec, self._tokenizer = executor, spec, tokenizer
        self._prompts: asyncio.Queue[tuple[int, ...]] = asyncio.Queue()
        self._turns: asyncio.Queue[Action] = asyncio.Queue()
        self._running: asyncio.Task[dict[str, Any]] | None = None
        self._lock = asyncio.Lock()

    async def reset(self, task: Task) -> Observation | Done:
        """Start `execute`."""
        work = self._executor.execute(
            task.text,
            _label(task),
            _sampling_params(self._spec),
            self._spec.max_context_tokens,
            self._tokenizer,
            SimpleNamespace(generate=self._generate),
        )
        self._running = asyncio.ensure_future(work)
        return await self._next()

    async def step(self, action: Action) -> Observation | Done:
        """Return a turn to `execute`."""
        self._turns.put_nowait(action)
        return await self._next()

    async def close(self) -> None:
        """Cancel `execute`."""
        if self._running is not None:
            self._running.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await self._running

    async def _next(self) -> Observation | Done:
        """Wait for the next prompt or for the end."""
        assert self._running is not None
        prompt = asyncio.ensure_future(self._prompts.get())
        try:
            await asyncio.wait({prompt, self._running}, return_when=asyncio.FIRST_COMPLETED)
            if prompt.done():
                return Observation(TokenIds(prompt.result()))
        finally:
            prompt.cancel()
        result = self._running.result()
        reward = result.get("reward")
        logs = _numbers({"scores": result.get("scores"), **(result.get("extra_logs") or {})})
        return Done(None if reward is None else float(reward), metrics=logs, truncated=bool(result.get("truncated")))

    async def _generate(self, token_ids: Any, sampling_params: Any = None, **_other: Any) -> SimpleNamespace:
        """Stand in for the engine of OpenRLHF; one turn at a time."""
        async with self._lock:
            self._prompts.put_nowait(tuple(int(i) for i in token_ids))
            action = await self._turns.get()
        reason = "length" if action.truncated else "stop"
        output = SimpleNamespace(
            token_ids=list(action.token_ids), text=action.text, finish_reason=reason, logprobs=None, index=0
        )
        return SimpleNamespace(outputs=[output], prompt_token_ids=list(token_ids), finished=True)


class _Tokenizer:
    """The tokenizer of transformers, read at the first use: many agent files tokenize nothing."""

    def __init__(self, spec: EnvironmentSpec) -> None:
        """Take the model, and the date that chat templates write."""
        self._source, self._template, self._date = spec.model, spec.chat_template, spec.date

    @functools.cached_property
    def _tokenizer(self) -> Any:
        try:
            import transformers
        except ImportError:
            raise ImportError(f"this file uses the tokenizer: {install_command('fourfold-reward[openrlhf]')}") from None
        try:
            # Not AutoTokenizer: its classes for single models may change what tokenizer.json says.
            folder = model_folder.resolve(self._source, self._template)
            return transformers.PreTrainedTokenizerFast.from_pretrained(folder)
        except (FourfoldError, OSError, ValueError) as error:
            raise ImportError(
                f"model.source = {self._source!r} has no tokenizer that can be read here: {error}"
            ) from None

    def __getattr__(self, name: str) -> Any:
        # Names that copy and hash look for, and all names before __init__: `_tokenizer` needs what __init__ sets.
        if name.startswith("__") or "_source" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self._tokenizer, name)

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self._tokenizer(*args, **options)

    def apply_chat_template(self, *args: Any, **options: Any) -> Any:
        """Render with the date of the run: transformers gives templates the clock."""
        fixed = {"strftime_now": datetime.datetime.fromisoformat(self._date).strftime} if self._date else {}
        return self._tokenizer.apply_chat_template(*args, **{**fixed, **options})

    def __len__(self) -> int:
        return len(self._tokenizer)


def _label(task: Task) -> Any:
    return "" if task.answer_value is None else task.answer_value


async def _value(result: Any) -> Any:
    return await result if inspect.isawaitable(result) else result


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """Return the values that are single numbers."""
    found = {}
    for name, value in values.items():
        with contextlib.suppress(TypeError, ValueError, RuntimeError):
            found[str(name)[:64]] = float(value)
    return found
