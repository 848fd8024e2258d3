"""Starts plain transformers, the backend and the service, measures rounds of each in turn, and compares them.

A way that fails is left out of the rounds, and its error is in the result; the others are measured all the same.
"""

from __future__ import annotations

import importlib.util
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from fourfold.config import Config, from_tables
from fourfold.errors import DeadlinePassed, FourfoldError, Unavailable
from fourfold_bench.gpus import visible
from fourfold_bench.harness import BenchmarkRun
from fourfold_bench.processes import BenchProcesses, say
from fourfold_bench.reward_model import turns
from fourfold_bench.reward_model.benchmark import BACKEND, GRPC, PLAIN, RewardModelSettings
from fourfold_bench.reward_model.ours import reward_model_table

_START_SECONDS: Final = 120.0
_ROUND_SECONDS: Final = 60.0
_ROUNDS: Final = (3, 12)  # fewest and most
_POLL_SECONDS: Final = 0.01
_SERVICE: Final = "reward"
# Largest mean difference of two ways' scores, in standard deviations of the scores, that rounding explains.
_NOISE: Final = {"bfloat16": 0.1, "float32": 1e-3}


class Way:
    """One way to score the texts: a child process that answers requests."""

    def __init__(self, name: str, child: str, request: Mapping[str, Any]) -> None:
        self.name, self.child, self.request = name, child, dict(request)
        self.seconds: list[float] = []
        self.scores: list[float] = []
        self.facts: dict[str, Any] = {}
        self.error = ""


class Rounds:
    """Waits for the children, before a common deadline. A child that ends fails its own ways only."""

    def __init__(self, settings: RewardModelSettings, processes: BenchProcesses, began: float) -> None:
        self.processes = processes
        self._numbers: dict[str, int] = {}
        self._ended: dict[str, str] = {}  # why each child ended that has ended
        self._end = began + settings.limit

    @property
    def left(self) -> float:
        """Seconds until the deadline."""
        return self._end - time.monotonic()

    def ask(self, way: Way, request: Mapping[str, Any], *, timeout: float) -> dict[str, Any]:
        """Return a child's answer. Raises as `wait`."""
        number = self._numbers.get(way.child, 0)
        self._numbers[way.child] = number + 1
        path = turns.ask(self.processes.folder, way.child, number, {**request})
        self.wait(way.child, path.exists, timeout=timeout)
        answer: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return answer

    def wait(self, child: str, until: Callable[[], bool], *, timeout: float, also: str = "") -> None:
        """Wait until `until` returns True.

        Raises:
            Unavailable: the child, or the one that it depends on (`also`), has ended.
            DeadlinePassed: it took longer than `timeout` seconds, or than is left.
        """
        deadline = time.monotonic() + max(min(timeout, self.left), 1.0)
        while not until():
            self._ended |= self.processes.take_ended()
            for name in (child, also):
                if name in self._ended:
                    raise Unavailable(self._ended[name] or f"{name} has ended")
            if time.monotonic() > deadline:
                raise DeadlinePassed(f"{child} is late; its log is {self.processes.log(child)}")
            time.sleep(_POLL_SECONDS)


def measure(settings: RewardModelSettings, run: BenchmarkRun) -> dict[str, Any]:
    """Measure all ways; return JSON values."""
    began = time.monotonic()
    with BenchProcesses(run.folder) as processes:
        given = settings.write(run.folder / "settings.json")
        say("writing the model")
        model = processes.write_model(settings.shape, context=settings.longest, score=True)
        rounds = Rounds(settings, processes, began)
        ways = _start(settings, rounds, given, model)
        _prepare(ways, rounds)
        _measure_in_turn(settings, ways, rounds)
    return summarise(settings, ways) | {"seconds": round(time.monotonic() - began, 1)}


def _start(settings: RewardModelSettings, rounds: Rounds, given: Path, model: Path) -> list[Way]:
    """Start all children at the same time and wait until each is ready."""
    names = ["sdpa"]
    if settings.on_gpu and importlib.util.find_spec("flash_attn") is not None:
        names.append("flash_attention_2")
    ways = [Way(f"{PLAIN}{name}", "plain", {"attention": name}) for name in names]
    ways += [Way(BACKEND, "backend", {}), Way(GRPC, "grpc", {})]
    processes, env = rounds.processes, visible(settings.device)
    folder, module = processes.folder, "fourfold_bench.reward_model"
    processes.start("plain", "-m", f"{module}.plain", str(given), str(model), str(folder), env=env)
    processes.start("backend", "-m", f"{module}.ours", str(given), str(model), str(folder), "backend", env=env)
    processes.serve(_SERVICE, processes.write_recipe(recipe(settings, model)), env=env)
    say("loading the model in three processes")
    for child in ("plain", "backend", "grpc"):
        try:
            if child == "grpc":
                rounds.wait(_SERVICE, lambda: bool(processes.target(_SERVICE)), timeout=_START_SECONDS)
                words = (f"{module}.ours", str(given), processes.target(_SERVICE), str(folder), "grpc")
                processes.start("grpc", "-m", *words, env=visible("cpu"))
            rounds.wait(child, turns.ready(folder, child).exists, timeout=_START_SECONDS)
        except FourfoldError as error:
            _fail(ways, child, error)
    return ways


def recipe(settings: RewardModelSettings, model: Path) -> Config:
    """Return the recipe of the service. Raises ConfigError: the settings break a rule of recipes."""
    return from_tables(
        {
            "name": "bench-reward-model",
            "steps": 1,
            "model": {"source": str(model)},
            "data": {"train": {"path": "none.jsonl"}},
            "sampling": {"max_new_tokens": 1},
            "batch": {"prompts_per_step": 1, "group_size": 2},
            "reward": {"model": reward_model_table(settings, str(model)), "timeout_seconds": _ROUND_SECONDS},
        },
        source="the benchmark's recipe",
    )


def _prepare(ways: Sequence[Way], rounds: Rounds) -> None:
    """Find the batch sizes of plain transformers, and run one round of each way that does not count."""
    for way in ways:
        if way.error:
            continue
        say(f"preparing {way.name}")
        try:
            if way.child == "plain":
                way.facts |= rounds.ask(way, {**way.request, "prepare": True}, timeout=_START_SECONDS)
            rounds.ask(way, way.request, timeout=_ROUND_SECONDS)
        except FourfoldError as error:
            _fail(ways, way.child, error)


def _measure_in_turn(settings: RewardModelSettings, ways: Sequence[Way], rounds: Rounds) -> None:
    """Measure rounds until each way has had its seconds."""
    say("measuring the ways in turn")
    least, most = _ROUNDS
    for number in range(most):
        longest = sum(way.seconds[-1] for way in ways if way.seconds)
        had = [sum(way.seconds) for way in ways if not way.error]
        if not had or rounds.left < longest or (number >= least and min(had) >= settings.seconds):
            return
        for way in ways:
            if way.error:
                continue
            try:
                answer = rounds.ask(way, way.request, timeout=_ROUND_SECONDS)
            except FourfoldError as error:
                _fail(ways, way.child, error)
                continue
            way.seconds.append(answer["seconds"])
            way.scores = answer["scores"]
            way.facts |= {"passes": answer["passes"]} if "passes" in answer else {}


def _fail(ways: Sequence[Way], child: str, error: FourfoldError) -> None:
    say(f"{child} failed: {error.message}")
    for way in ways:
        if way.child == child:
            way.error = error.message


def summarise(settings: RewardModelSettings, ways: Sequence[Way]) -> dict[str, Any]:
    """Return speeds, their ratios to the fastest plain way, and differences of the scores to the first plain way."""
    lengths = [len(text) for text in settings.texts()]
    tokens = sum(lengths)
    found: dict[str, dict[str, Any]] = {}
    for way in ways:
        found[way.name] = each = dict[str, Any](way.facts)
        if way.error:
            each["error"] = way.error
        if way.seconds:
            median = statistics.median(way.seconds)
            each |= {"seconds": [round(value, 4) for value in way.seconds], "median_seconds": round(median, 4)}
            each["tokens_per_second"] = round(tokens / median, 1)
    plain = [each["tokens_per_second"] for name, each in found.items() if name.startswith(PLAIN) and "seconds" in each]
    disagreements = []
    reference = next((way for way in ways if way.scores and way.child == "plain"), None)
    for way in ways:
        each = found[way.name]
        if plain and "seconds" in each:
            each["ratio"] = round(each["tokens_per_second"] / max(plain), 4)
        if reference is None or way is reference or not way.scores:
            continue
        scale = float(np.std(reference.scores)) or 1.0
        apart = np.abs(np.subtract(way.scores, reference.scores)) / scale
        each["difference"] = round(float(apart.max()), 6)
        if not float(apart.mean()) <= _NOISE[settings.dtype]:
            disagreements.append(
                f"{way.name} from {reference.name}: {apart.mean():.3f} standard deviations in the mean"
            )
    passes = next((way.facts["passes"] for way in ways if "passes" in way.facts), "unknown")
    return {
        "texts": len(lengths),
        "tokens": tokens,
        "rounds": max((len(way.seconds) for way in ways), default=0),
        "passes": passes,
        "ways": found,
        "disagreements": disagreements,
    }
