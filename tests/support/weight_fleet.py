"""Runs real services for the fault tests of the weight plane: one trainer, rollout services, and their expected output.

The trainer first makes two steps and saves after each, so that it can take the weights `one` or `two` at any time,
under versions that only grow. Engines start with the weights `base`. For each of the three, an engine that started with
them provides the expected completions, with which those of updated engines are compared.

    FOURFOLD_FAULTS_BACKEND   shm, gloo (default: each where it matters), nccl, cuda_ipc
    FOURFOLD_FAULTS_DEVICE    cpu (default), cuda: one GPU or more, for nccl two or more
    FOURFOLD_FAULTS_SECONDS   time of an update (default 6), and 1.5 times that of an abort; more on a busy machine

On GPUs the trainer has two ranks if there are GPUs for two, else one (`two_ranks`). NCCL refuses two ranks on one GPU:
with two GPUs, one engine runs on the trainer's GPU and reads by cuda_ipc, and the other one gets its weights by nccl,
as on machines whose GPUs have no peer access.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Final

import numpy as np
import psutil

from fourfold import config as configuration
from fourfold.config import Config
from fourfold.coordinator.v1.membership_service_pb2 import Role
from fourfold.errors import Unavailable
from fourfold.host.hardware import visible_gpus
from fourfold.host.process_tree import PARENT_PID_VARIABLE
from fourfold.model.tokenizer import tokenizer_sha256
from fourfold.rollout.client import AsyncRolloutClient, RolloutControlClient
from fourfold.rollout.v1 import rollout_control_service_pb2 as control
from fourfold.rollout.v1 import rollout_service_pb2 as pb
from fourfold.rpc.channel import open_channel
from fourfold.sample.wire import encode
from fourfold.trainer.client import AsyncTrainerClient, TrainerWeightClient
from fourfold.weights.manifest import Manifest
from fourfold_coordinator.routing.registry import Member
from tests.support.trainer_driver import batch, trainer_environment
from tests.support.weight_coordinator import MIXED, UPDATE_SECONDS

BACKEND: Final = os.environ.get("FOURFOLD_FAULTS_BACKEND", "")
DEVICE: Final = os.environ.get("FOURFOLD_FAULTS_DEVICE", "cpu")
BACKENDS: Final = (BACKEND,) if BACKEND else ("shm", "gloo")
"""Longest time of an update, weights.timeout_seconds."""
_START_SECONDS: Final = 240.0
_CALL_SECONDS: Final = 60.0
STEPS: Final = {"one": 1, "two": 2}
"""Checkpoint of each of the trainer's weights."""

RECIPE: Final = """
name = "faults"
steps = 10
model = {{ source = "{model}", max_context_tokens = 64 }}
data = {{ train = {{ reasoning_gym = "products", size = 8 }} }}
batch = {{ prompts_per_step = 5, group_size = 4, tokens_per_micro_batch = 64 }}
sampling = {{ max_new_tokens = 8 }}
trainer = {{ ranks = {ranks}, device = "{device}", learning_rate = 2e-2, step_timeout_seconds = 240 }}
rollout = {{ max_concurrent_samples = 16, max_batched_tokens = 64, gpus_per_replica = {gpus}, {more} }}
weights = {{ timeout_seconds = {timeout}, backend = "{backend}" }}
retry = {{ infrastructure = 1, service_wait_seconds = 3.0 }}
"""

Answers = list[list[int]]


class Process:
    """A service."""

    role: int

    def __init__(self, argv: Sequence[str], folder: Path, log: str, environment: dict[str, str]) -> None:
        self.log = folder / f"{log}.log"
        self.member_id, self.incarnation = log, uuid.uuid4().hex
        command = [sys.executable, "-m", "fourfold", "serve", *argv]
        with self.log.open("wb") as out:
            self._process = subprocess.Popen(command, stdout=out, stderr=out, env=environment, cwd=folder)
        self.pid = self._process.pid
        self.target = ""

    def wait_ready(self) -> None:
        """Wait for the READY line."""
        end = time.monotonic() + _START_SECONDS
        while not self.target:
            assert self._process.poll() is None, f"{self.member_id} ended: {self.says()}"
            assert time.monotonic() < end, f"{self.member_id} is not ready: {self.says()}"
            ready = [line for line in self.log.read_text().splitlines() if line.startswith("READY ")]
            if ready:
                self.target = ready[0].split()[1]
            else:
                time.sleep(0.05)

    def says(self) -> str:
        """Return the last 4,000 characters of its log."""
        return self.log.read_text()[-4000:]

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def wait(self, seconds: float) -> int:
        """Wait for its end; return the exit code."""
        return self._process.wait(seconds)

    def end(self) -> None:
        """SIGKILL the process and its children, including stopped ones."""
        children = []
        if self.alive:
            with suppress(psutil.NoSuchProcess):
                children = psutil.Process(self.pid).children(recursive=True)
            self._process.kill()
        self._process.wait(10)
        for child in children:
            with suppress(psutil.NoSuchProcess):
                child.kill()

    def member(self, tokenizer: bytes) -> Member:
        """Return the process as a coordinator's member."""
        return Member(
            member_id=self.member_id,
            incarnation=self.incarnation,
            role=self.role,
            target=self.target,
            tokenizer_sha256=tokenizer,
        )


class Engine(Process):
    """A rollout service with vLLM in a child process."""

    role = Role.ROLE_ROLLOUT
    weights = "base"
    """Name of the weights that the engine starts with."""
    gpu = ""

    @property
    def core(self) -> int:
        """Pid of the engine's own process."""
        children = psutil.Process(self.pid).children()
        return int(next(c.pid for c in children if "EngineCore" in " ".join(c.cmdline())))

    async def sample(self) -> tuple[set[int], Answers]:
        """Return the versions of greedy and seeded completions, and their tokens."""
        channel = open_channel(self.target, None)
        versions: set[int] = set()
        answers: Answers = []
        try:
            client = AsyncRolloutClient(channel, peer=self.member_id)
            for number in range(3):
                for temperature, count in ((0.0, 1), (1.0, 2)):
                    request = pb.GenerateRequest(
                        request_id=uuid.uuid4().hex,
                        prompt_token_ids=np.random.default_rng(number).integers(3, 500, 9).tolist(),
                        sample_count=count,
                        sampling_params=pb.SamplingParams(max_tokens=10, seed=number, temperature=temperature),
                    )
                    for one in await client.complete(request, timeout=_CALL_SECONDS):
                        answers.append(one.token_ids.tolist())
                        versions |= {span.policy_version for span in one.version_spans}
        finally:
            await channel.close()
        return versions, answers

    async def describe(self) -> control.DescribeEngineResponse:
        """Return the engine's description."""
        channel = open_channel(self.target, None)
        try:
            return await RolloutControlClient(channel, peer=self.member_id).describe(timeout=5)
        finally:
            await channel.close()


class Trainer(Process):
    """A trainer service."""

    role = Role.ROLE_TRAINER

    @property
    def rank(self) -> int:
        """Pid of its second rank; of the service itself where there is only one."""
        children = psutil.Process(self.pid).children(recursive=True)
        return int(next((c.pid for c in children if "fourfold_trainer.ranks.main" in c.cmdline()), self.pid))


class Fleet:
    """The services of all cases of a test module, and spare ones that start in the background."""

    def __init__(self, model: Path, folder: Path) -> None:
        self._gpus = [gpu.id for gpu in visible_gpus()] if DEVICE == "cuda" else []
        self.two_ranks = DEVICE == "cpu" or len(self._gpus) > (3 if BACKEND == "nccl" else 1)
        self._mixed = BACKEND == "nccl" and len(self._gpus) == 2
        self._ranks = 2 if self.two_ranks else 1
        self.folder = folder
        self.tokenizer = tokenizer_sha256(model)
        self.recipe = self._write_recipe(model, "base")
        self._made: list[Engine] = []
        self._engines: list[Engine] = []
        self._starting: list[Engine] = []
        self._trainers: list[Trainer] = []
        self.truth: dict[str, Answers] = {}
        """Expected completions, by the name of the weights."""
        self.published: dict[int, str] = {0: ""}
        """Weights by version; an engine's own have version 0."""
        self.trainer = self._start_trainer()
        self._starting.append(self._start_engine(self.recipe))

    async def learn(self) -> None:
        """Train the weights, and sample the expected completions with fresh engines."""
        self.trainer.wait_ready()
        recipes = {"base": self.recipe}
        async with self.trainer_client() as client:
            for name, step in STEPS.items():
                await client.train_step(step, [encode(sample) for sample in batch(step)], timeout=_CALL_SECONDS)
                assert await client.save_checkpoint(timeout=_CALL_SECONDS) == step
                folder = Path(await client.export_model(f"model-{name}", timeout=_CALL_SECONDS))
                recipes[name] = self._write_recipe(folder, name)
        fresh = {"base": self._starting.pop(), **{n: self._start_engine(recipes[n]) for n in STEPS}}
        for name, engine in fresh.items():
            engine.wait_ready()
            engine.weights = name
            versions, self.truth[name] = await engine.sample()
            assert versions == {0}
            assert await engine.sample() == (versions, self.truth[name]), "an engine does not repeat itself"
        assert len({str(answers) for answers in self.truth.values()}) == 3
        self._engines = list(fresh.values())

    def config(self, backend: str = "") -> Config:
        """Return the recipe, with one of BACKENDS."""
        config = configuration.load(self.recipe)
        weights = config.weights.model_copy(update={"backend": MIXED if self._mixed else backend or BACKENDS[0]})
        return config.model_copy(update={"weights": weights})

    def engines(self, count: int) -> list[Engine]:
        """Return engines that run; those that ended are replaced, and the next one starts."""
        self._engines = [engine for engine in self._engines if engine.alive]
        while len(chosen := self._apart()) < count:
            self.prepare()
            self._engines.append(self._starting.pop(0))
            self._engines[-1].wait_ready()
        return sorted(chosen[-count:], key=lambda engine: engine.gpu) if self._mixed else chosen[-count:]

    def _apart(self) -> list[Engine]:
        """Return the newest engines, with NCCL one on each GPU: NCCL refuses two ranks on one."""
        newest = {engine.gpu if BACKEND == "nccl" else engine.member_id: engine for engine in self._engines}
        return [engine for engine in self._engines if engine in newest.values()]

    def prepare(self, count: int = 1) -> None:
        """Have so many engines starting."""
        while len(self._starting) < count:
            self._starting.append(self._start_engine(self.recipe))

    def other_model(self, model: Path) -> Engine:
        """Start an engine of another model, which is none of `engines`."""
        engine = self._start_engine(self._write_recipe(model, "other"))
        engine.wait_ready()
        return engine

    def next_trainer(self) -> None:
        """Replace a trainer that ended."""
        self.trainer.end()
        self.trainer = self._start_trainer()

    @asynccontextmanager
    async def trainer_client(self) -> AsyncIterator[AsyncTrainerClient]:
        """Connect to the trainer, within a block."""
        channel = open_channel(self.trainer.target, None)
        yield AsyncTrainerClient(channel, peer=self.trainer.member_id)
        await channel.close()

    async def become(self, name: str) -> int:
        """Give the trainer the weights `name`, under a new version; return that."""
        self.trainer.wait_ready()
        async with self.trainer_client() as client:
            await client.load_checkpoint(STEPS[name], timeout=_CALL_SECONDS)
            version = await client.raise_policy_version(max(self.published) + 1, timeout=_CALL_SECONDS)
        self.published[version] = name
        return int(version)

    async def turn(self) -> int:
        """Give the trainer other weights than those published last; return the version."""
        return await self.become("one" if self.published[max(self.published)] == "two" else "two")

    async def flip_sent_bit(self, name: str) -> None:
        """Flip a bit of a tensor that lies in the trainer's shared memory."""
        channel = open_channel(self.trainer.target, None)
        layout = await TrainerWeightClient(channel, peer="trainer-0").get_manifest(timeout=10)
        await channel.close()
        manifest = Manifest.from_bytes(layout.manifest)
        tensor = next(i for i, spec in enumerate(manifest.tensors) if spec.name == name)
        span = next(span for span in manifest.spans if span.tensor == tensor)
        _flip((self.trainer.pid, self.trainer.rank)[span.rank], manifest.shard_bytes[span.rank], span.offset)

    async def check_whole(self, engine: Engine, version: int | None = None) -> None:
        """Check that an engine serves whole weights of the version that its completions carry."""
        versions, answers = await engine.sample()
        (served,) = versions
        assert version is None or served == version
        name = self.published[served] or engine.weights
        assert answers == self.truth[name], f"{engine.member_id} does not serve version {served}"

    async def check_settled(self, engine: Engine, seconds: float) -> str:
        """Check that an engine ends its update in time: "clean" with whole weights, or "dirty" and refusing."""
        end = time.monotonic() + seconds
        while (about := await engine.describe()).weight_state == control.WEIGHT_STATE_UPDATING:
            assert time.monotonic() < end, f"{engine.member_id} is updating for more than {seconds} s: {engine.says()}"
            await asyncio.sleep(0.05)
        if about.weight_state == control.WEIGHT_STATE_CLEAN:
            await self.check_whole(engine)
            return "clean"
        try:
            await engine.sample()
        except Unavailable as error:
            assert error.reason == "WEIGHTS_DIRTY"
            return "dirty"
        raise AssertionError(f"{engine.member_id} is dirty and samples")

    def members(self, engines: Sequence[Engine]) -> list[Member]:
        """Return the trainer and engines as a coordinator's members."""
        return [process.member(self.tokenizer) for process in (self.trainer, *engines)]

    def close(self) -> None:
        """End everything."""
        for process in (*self._engines, *self._starting, *self._trainers):
            process.end()

    def _write_recipe(self, model: Path, name: str) -> Path:
        path = self.folder / f"{name}.toml"
        path.write_text(
            RECIPE.format(
                model=model,
                ranks=self._ranks,
                device=DEVICE,
                gpus=int(DEVICE == "cuda"),
                more="kv_cache_gib = 1" + (", enforce_eager = true" if DEVICE == "cuda" else ""),
                timeout=UPDATE_SECONDS,
                backend=MIXED if self._mixed else BACKENDS[0],
            )
        )
        return path

    def _start_trainer(self) -> Trainer:
        argv = ["trainer", str(self.recipe), "--run-dir", str(self.folder / "run"), "--member-id", "trainer-0"]
        environment = trainer_environment() | {PARENT_PID_VARIABLE: str(os.getpid())}
        if self._gpus:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(self._gpus[: self._ranks])
        self._trainers.append(Trainer(argv, self.folder, "trainer-0", environment))
        return self._trainers[-1]

    def _start_engine(self, recipe: Path) -> Engine:
        name = f"rollout-{len(self._made)}"
        environment = {k: v for k, v in os.environ.items() if not k.startswith("VLLM_")}
        environment |= {PARENT_PID_VARIABLE: str(os.getpid()), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        environment["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        if self._gpus:
            # NCCL refuses two ranks on one GPU.
            free = self._gpus[self._ranks :] if BACKEND == "nccl" and not self._mixed else self._gpus
            taken = [engine.gpu for engine in self._made if engine.alive]
            environment["CUDA_VISIBLE_DEVICES"] = min(free, key=taken.count)
        engine = Engine(["rollout", str(recipe), "--member-id", name], self.folder, name, environment)
        engine.gpu = environment.get("CUDA_VISIBLE_DEVICES", "")
        self._made.append(engine)
        return engine


def _flip(pid: int, shard_bytes: int, offset: int) -> None:
    """Flip a bit of the shard in a process's arena, which is a header and the shard."""
    for path in Path(f"/proc/{pid}/fd").iterdir():
        header = path.stat().st_size - shard_bytes if path.exists() else 0
        if "memfd:fourfold" in str(path.readlink()) and 0 < header <= 1 << 16:
            with path.open("r+b", buffering=0) as arena:
                (byte,) = os.pread(arena.fileno(), 1, header + offset)
                os.pwrite(arena.fileno(), bytes([byte ^ 1]), header + offset)
            return
    raise AssertionError(f"process {pid} has no arena")
