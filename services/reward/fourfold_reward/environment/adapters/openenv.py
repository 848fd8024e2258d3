"""Connects to environments of OpenEnv, which run as servers of their own.

OpenEnv keeps the state of an episode in a WebSocket connection; its plain HTTP calls share no state. An action is an
object with one text field, which the recipe names. The reward of the episode is the sum of the rewards of its steps.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from fourfold.host.proxies import proxy_for
from fourfold.install import install_command
from fourfold_reward.environment.adapters import Factory
from fourfold_reward.environment.protocol import Action, Done, Observation, Task
from fourfold_reward.environment.spec import EnvironmentSpec
from fourfold_reward.loader import VerifierError

_MAX_BYTES = 4 << 20


def load(spec: EnvironmentSpec) -> Factory:
    """Prepare connections to `environment.source`, the URL of a server.

    Options: `action_field` (default "message") of the server's action; `observation_field`, the field of the server's
    observation that the model sees (default: all of it as JSON); `reset`, further fields of the reset.

    Raises:
        ImportError: aiohttp is not installed.
        VerifierError: the source is no URL.
    """
    try:
        import aiohttp
    except ImportError:
        raise ImportError(
            f'environment.kind = "openenv" needs the package aiohttp: {install_command("fourfold-reward[openenv]")}'
        ) from None
    if not spec.source.startswith(("http://", "https://")):
        raise VerifierError(f"environment.source = {spec.source!r} is no URL; give http://HOST:PORT of the server")
    url = f"ws{spec.source.removeprefix('http').rstrip('/')}/ws"
    return Factory(make=lambda: OpenEnvEpisode(aiohttp.ClientSession, url, **spec.options))


class OpenEnvEpisode:
    """One connection to a server of OpenEnv."""

    def __init__(
        self,
        open_session: Any,
        url: str,
        *,
        action_field: str = "message",
        observation_field: str = "",
        reset: Mapping[str, Any] | None = None,
    ) -> None:
        """Keep the settings; `reset` connects. `open_session` makes an aiohttp.ClientSession."""
        self._open_session, self._url = open_session, url
        self._action_field, self._observation_field = action_field, observation_field
        self._reset = dict(reset or {})
        self._session: Any = None
        self._socket: Any = None
        self._reward = 0.0

    async def reset(self, task: Task) -> Observation | Done:
        """Connect and begin an episode with the task's seed."""
        self._session = self._open_session()
        proxy = proxy_for(self._url)
        try:
            self._socket = await self._session.ws_connect(self._url, max_msg_size=_MAX_BYTES, proxy=proxy)
        except Exception as error:
            if proxy is None:
                raise
            cause = f"{type(error).__name__} {getattr(error, 'status', '')}".rstrip()
            # Not the text of the error: it may have the password of the proxy.
            raise RuntimeError(
                f"{self._url} cannot be reached through the proxy of the environment ({cause}); check http_proxy and "
                f"https_proxy, or name the host in no_proxy"
            ) from None
        result = await self._ask("reset", {"seed": task.seed % (1 << 31), **self._reset})
        return result if isinstance(result, Done) else Observation(result)

    async def step(self, action: Action) -> Observation | Done:
        """Send the model's text as an action."""
        result = await self._ask("step", {self._action_field: action.text})
        return result if isinstance(result, Done) else Observation(result)

    def truncate(self) -> Done:
        """Return the rewards so far."""
        return Done(self._reward, truncated=True)

    async def close(self) -> None:
        """Close the connection, which ends the episode at the server."""
        if self._socket is not None:
            await self._socket.close()
        if self._session is not None:
            await self._session.close()

    async def _ask(self, kind: str, data: Mapping[str, Any]) -> str | Done:
        """Send a message; return the observation as text, or the end.

        Raises RuntimeError: the server answers with an error, or not as OpenEnv documents it.
        """
        await self._socket.send_str(json.dumps({"type": kind, "data": data}))
        message = await self._socket.receive()
        try:
            answer = json.loads(message.data)
            if answer["type"] == "error":
                raise RuntimeError(f"{self._url} answered {kind}: {str(answer['data'])[:500]}")
            content = answer["data"]["observation"]
            reward, done = answer["data"].get("reward"), answer["data"].get("done")
        except (KeyError, TypeError, ValueError, AttributeError):
            text = str(message.data)[:200]
            raise RuntimeError(f"{self._url} answered {kind} with {text!r}; OpenEnv answers an observation") from None
        self._reward += float(reward or 0.0)
        if done:
            return Done(self._reward)
        if not self._observation_field:
            return json.dumps(content, ensure_ascii=False)
        if self._observation_field not in content:
            raise RuntimeError(
                f"the observation has no {self._observation_field!r}; it has {', '.join(map(str, content))}: set "
                f"observation_field in environment.options"
            )
        return str(content[self._observation_field])
