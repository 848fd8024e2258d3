"""Kill -9 of any rank at any moment, then resume: the run goes on as if nothing had been.

The trainer is the service as a process, with two ranks under ZeRO-3, a policy with a moving average, a critic, an
adaptive KL coefficient, running moments of the scores, and two optimizer steps of each model in a step. It is fed
recorded batches, saves after every second step, and is killed by `tests/fault_injection` at the moments of MOMENTS.
After each death another trainer loads the newest checkpoint and gets the batches from there on. Every answer, and
every byte of the checkpoints, must be those of a run that nobody killed.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest

from fourfold import metrics
from fourfold.errors import FourfoldError
from fourfold.rpc.channel import open_channel
from fourfold.sample.wire import encode
from fourfold.trainer.client import AsyncTrainerClient
from tests.integration.test_trainer_service import Service
from tests.support.trainer_driver import LEARNING_RATE, REPOSITORY, batch, trainer_environment

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(1800)]

STEPS: Final = 6
EVERY: Final = 2
KEEP: Final = 2
CLOCKS: Final = (metrics.TIME_TRAIN, metrics.TRAIN_SPEED)
RECIPE: Final[Mapping[str, str]] = {
    "batch": "mini_batches_per_step = 2",
    "trainer": "ema_decay = 0.6\nschedule = 'cosine'\nwarmup_steps = 3\nweight_decay = 0.01",
    "tables": f"""
[critic]
learning_rate = {LEARNING_RATE}
[algorithm]
preset = "ppo"
[algorithm.kl]
target = 0.05
horizon = 200
[algorithm.shaping]
normalize = true
[checkpoint]
keep = {KEEP}
""",
}


@dataclass(frozen=True)
class Moment:
    """The rank that is killed, and when in a step or in the checkpoint after it; see tests/fault_injection.

    answer: between the answer of the step and its checkpoint. saved: after it.
    """

    rank: int
    name: str
    step: int
    occurrence: int = 1


# Of a step on each rank: lookup 2, forward and backward 12, optimizer 6, because each step of the critic has one group
# of parameters and each of the policy two; those of two models take turns. Of a checkpoint: file 2, load 147.
MOMENTS: Final = {
    "in CI": (
        Moment(1, "file", 2),
        Moment(1, "backward", 4, 12),
        Moment(0, "updated", 4, 6),
        Moment(0, "load", 4, 100),
    ),
    "the first steps": (
        Moment(0, "forward", 1),  # nothing is saved yet
        Moment(1, "file", 2),  # the policy's, of the first checkpoint
        Moment(1, "lookup", 3, 2),  # the critic's values
        Moment(0, "backward", 3, 3),
        Moment(1, "forward", 3, 9),
        Moment(0, "removal", 6),
    ),
    "the optimizers": (
        Moment(0, "optimizer", 3),  # the critic's first
        Moment(1, "updated", 4, 2),  # half of the policy's first
        Moment(1, "backward", 4, 12),
        Moment(0, "updated", 4, 6),  # all is done, but for the answer
        Moment(0, "answer", 4),
        Moment(1, "answer", 5),
    ),
    "the checkpoints": (
        Moment(0, "file", 4),
        Moment(1, "file", 4, 2),  # the critic's
        Moment(0, "files", 4),
        Moment(0, "saved", 4),
        Moment(1, "load", 4, 5),
        Moment(0, "load", 4, 100),
    ),
}


# These are waited for when the step is answered.
OF_A_CHECKPOINT: Final = ("file", "files", "removal")


class Trainers:
    """One trainer after another in one folder."""

    def __init__(self, model: Path, folder: Path) -> None:
        self._model, self._folder = model, folder
        self._doom = folder / "fault_injection"
        self.run_dir = folder / "run"

    @contextmanager
    def process(self, *, ranks: int = 2, stage: int = 3) -> Iterator[Service]:
        """Run one."""
        self._doom.unlink(missing_ok=True)
        path = os.pathsep.join([str(REPOSITORY / "tests" / "fault_injection"), trainer_environment()["PYTHONPATH"]])
        environment = {"FOURFOLD_FAULT": str(self._doom), "PYTHONPATH": path}
        service = Service(
            self._model,
            self._folder,
            ranks=ranks,
            stage=stage,
            timeout=240,
            dtype="float32",
            environment=environment,
            **RECIPE,
        )
        try:
            yield service
        finally:
            service.end()

    @asynccontextmanager
    async def client(self, service: Service) -> AsyncIterator[AsyncTrainerClient]:
        """Connect to one."""
        channel = open_channel(service.wait_ready(500), None)
        try:
            yield AsyncTrainerClient(channel, peer="trainer-0")
        finally:
            await channel.close()

    def doom(self, moment: Moment) -> None:
        """Let a rank die at the moment's next occurrence."""
        fresh = self._doom.with_suffix(".new")
        fresh.write_text(f"{moment.rank} {moment.name} {moment.occurrence}")
        fresh.replace(self._doom)

    def checkpoint(self, step: int) -> Path:
        return self.run_dir / "checkpoints" / f"step-{step:06d}"


@dataclass(frozen=True)
class Truth:
    """What a run does that nobody kills."""

    run_dir: Path
    answers: list[dict[str, Any]]


async def train(client: AsyncTrainerClient, step: int) -> dict[str, Any]:
    """Send the recorded batch of a step; return what it answered, but for what a clock says."""
    answer = await client.train_step(step, [encode(s) for s in batch(step)], timeout=200)
    found = {name: value for name, value in answer.metrics.items() if name not in CLOCKS}
    return {**found, "policy_version": answer.policy_version, "skipped": answer.skipped_reason}


async def resume(client: AsyncTrainerClient) -> int:
    """Go back to the newest checkpoint, if any; return its step."""
    newest = (await client.get_status(timeout=60)).checkpoint_step
    if newest < 0:
        return 0
    return (await client.load_checkpoint(newest, timeout=200)).step


async def go_on(client: AsyncTrainerClient, truth: Truth, first: int, last: int) -> None:
    """Train from `first` to `last`, saving after every second one; all answers are those of the truth."""
    for step in range(first, last + 1):
        assert await train(client, step) == truth.answers[step - 1], f"step {step}"
        if step % EVERY == 0:
            assert await client.save_checkpoint(timeout=200) == step


async def meet(trainers: Trainers, moment: Moment, truth: Truth) -> None:
    """Go on with the run until a rank dies at its moment."""
    with trainers.process() as service:
        async with trainers.client(service) as client:
            victim = service.process.pid if moment.rank == 0 else service.ranks()[moment.rank - 1].pid
            if moment.name == "load":
                trainers.doom(moment)
            with pytest.raises(FourfoldError):
                done = await resume(client)
                await go_on(client, truth, done + 1, moment.step - 1)
                if moment.name not in OF_A_CHECKPOINT:
                    trainers.doom(moment)
                if moment.step > done:
                    assert await train(client, moment.step) == truth.answers[moment.step - 1]
                if moment.name in OF_A_CHECKPOINT:
                    trainers.doom(moment)
                if moment.name != "answer":
                    assert await client.save_checkpoint(timeout=200) == moment.step
                os.kill(victim, signal.SIGKILL)
                await client.save_checkpoint(timeout=20)
        code = service.process.wait(30)
        assert code == (-signal.SIGKILL if moment.rank == 0 else 1)
        if moment.rank:
            said = service.log.read_text()[-1500:]
            assert f"trainer-0-rank-{moment.rank} died" in said and "SIGKILL" in said


def same_files(folder: Path, wanted: Path) -> None:
    """The same names and bytes, but for times in the trainer's state."""
    assert names(folder) == names(wanted)
    for path in wanted.iterdir():
        if path.name != "trainer.json":
            assert (folder / path.name).read_bytes() == path.read_bytes(), path.name
    if (wanted / "trainer.json").exists():  # an export has none
        assert state(folder) == state(wanted)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def state(folder: Path) -> Any:
    record = json.loads((folder / "trainer.json").read_text())
    for name in CLOCKS:
        del record["state"]["answer"]["metrics"][name]
    return record


@pytest.fixture(scope="module")
def llama(tiny_model: Callable[..., Path]) -> Path:
    return tiny_model("llama", 0, "float32")


@pytest.fixture(scope="module")
def truth(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Truth:
    return asyncio.run(undisturbed(Trainers(llama, tmp_path_factory.mktemp("truth"))))


async def undisturbed(trainers: Trainers) -> Truth:
    """Run all steps and one more."""
    answers = []
    with trainers.process() as service:
        async with trainers.client(service) as client:
            for step in range(1, STEPS + 2):
                answers.append(await train(client, step))
                if step % EVERY == 0:
                    await client.save_checkpoint(timeout=200)
            await client.export_model("model", timeout=200)
            await client.export_model("model-ema", ema=True, timeout=200)
    assert len({json.dumps(answer) for answer in answers}) == STEPS + 1
    return Truth(run_dir=trainers.run_dir, answers=answers)


@pytest.mark.parametrize(
    "place", ["in CI", *(pytest.param(place, marks=pytest.mark.soak) for place in list(MOMENTS)[1:])]
)
async def test_a_run_that_is_killed_again_and_again_goes_on_bit_for_bit(
    llama: Path, truth: Truth, tmp_path: Path, place: str
) -> None:
    trainers = Trainers(llama, tmp_path)
    for moment in MOMENTS[place]:
        try:
            await meet(trainers, moment, truth)
        except BaseException as error:
            error.add_note(str(moment))
            raise
    with trainers.process() as service:
        async with trainers.client(service) as client:
            await go_on(client, truth, await resume(client) + 1, STEPS)
            assert await train(client, STEPS + 1) == truth.answers[STEPS]
            await client.export_model("model", timeout=200)
            await client.export_model("model-ema", ema=True, timeout=200)
    checkpoints = names(truth.run_dir / "checkpoints")
    assert checkpoints == ["step-000004", "step-000006"]
    assert names(trainers.run_dir / "checkpoints") == checkpoints
    for name in (*checkpoints, "../model", "../model-ema"):
        same_files(trainers.run_dir / "checkpoints" / name, truth.run_dir / "checkpoints" / name)
