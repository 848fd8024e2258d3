"""Scores samples with a program of the user that reads and writes lines: `[reward] command = ["./scorer", "--fast"]`.

{"id": "s1", "prompt": ..., "completion": ..., "answer": ..., "metadata": {...}}            one line of stdin
{"id": "s1", "score": 0.5, "components": {...}}   0.5   {"abstain": "REASON"}   {"error": "text"}   one of stdout
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from fourfold.errors import ConfigError
from fourfold.reward.function import Abstain
from fourfold.text import clean
from fourfold.workers.child import Child, Rights, WorkerDied
from fourfold.workers.frames import Lines
from fourfold.workers.pool import Pool
from fourfold_reward.columns import parse_metadata, to_json
from fourfold_reward.job import Job
from fourfold_reward.protocol import Outcome, outcome_of
from fourfold_reward.sample_queue import SlotScorer
from fourfold_reward.scores import InvalidSample
from fourfold_reward.signatures import Reads
from fourfold_reward.worker_sandbox import WorkerSandbox

_log = logging.getLogger(__name__)

# A program that cannot run usually ends at once, such as a script with a missing import.
_WATCHED_SECONDS: Final = 0.5
_MAX_LINE_BYTES: Final = 1 << 20
# No one can grant the program more CPU time for each sample, as a worker does. The time limit of a sample ends it.
_CPU_SECONDS: Final = 1 << 30


class ProgramFault(Exception):
    """The program did not answer one sample with one line. `reason` is a key of ERROR_CODES."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class CommandPool(SlotScorer):
    """A backend of one program in several processes; see `fourfold_reward.backend.Backend`."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        processes: int,
        timeout_seconds: float,
        sandbox: WorkerSandbox,
        on_failure: Callable[[str], None],
    ) -> None:
        """Find the program; `start` starts it. Raises ConfigError: there is no such program."""
        self._program = _find_program(command[0])
        self._words = (command[0], *command[1:])
        self._files = [self._program, *(Path(word) for word in command[1:] if _is_file(word))]
        try:
            self._version = _digest(self._files)
        except WorkerDied as error:
            raise ConfigError(f"reward.command: {error}") from None
        self._timeout, self._sandbox = timeout_seconds, sandbox
        self._pool = Pool(self._launch, title="command pool", on_failure=on_failure)
        super().__init__(slots=processes, on_failure=on_failure)
        self.reads = Reads()

    @property
    def scorer(self) -> str:
        """Names of the program and of the files among its arguments, and a hash of them all."""
        return f"{' '.join(file.name for file in self._files)}@{self._version}"

    @property
    def process_count(self) -> int:
        return self._worker_count

    def worker_pids(self) -> list[int]:
        """Return the process ids of the running programs."""
        return self._pool.pids()

    async def start(self) -> None:
        """Start the processes. Raises ConfigError: the program cannot be started, or ends at once."""
        try:
            await self._pool.start(self.process_count)
        except (OSError, WorkerDied) as error:
            raise ConfigError(f"reward.command = {self._title} cannot be started: {error}") from None
        for process in list(self._pool.children):
            if end := await process.ended(_WATCHED_SECONDS / self.process_count):
                raise ConfigError(
                    f"reward.command = {self._title} {end} before the first sample; it must read lines from stdin "
                    f"until their end. Its errors are in the log of this service"
                )
        self.start_slots()

    async def close(self) -> None:
        await super().close()
        await self._pool.close()

    @property
    def _title(self) -> str:
        return repr(" ".join(self._words))[:200]

    async def _launch(self) -> Child:
        if _digest(self._files) != self._version:
            raise WorkerDied(f"the files of {self.scorer} changed while the service ran; restart the service")
        return await Child.start_program(
            str(self._program), self._words, self._rights, Lines(_MAX_LINE_BYTES), purpose="reward-command"
        )

    def _rights(self, scratch: Path) -> Rights:
        rights = self._sandbox.rights(scratch, builtin=False, timeout_seconds=0)
        return replace(rights, policy=rights.policy and replace(rights.policy, cpu_seconds=_CPU_SECONDS))

    async def score_batch(self, jobs: Sequence[Job]) -> Sequence[Outcome]:
        (job,) = jobs
        try:
            request = _request(job)
            process = await self._pool.take()
        except InvalidSample as error:
            return [Outcome.error(error.reason, str(error))]
        except WorkerDied as error:
            return [Outcome.error("WORKER_DIED", str(error))]
        except OSError as error:
            return [Outcome.error("WORKER_DIED", f"the program could not be started: {error}")]
        outcome, usable = await self._score_one(process, job, request)
        if usable:
            self._pool.put(process)
        else:
            _log.warning("program restarted: sample=%s cause=%s", job.sample_id, outcome.message)
            await self._pool.kill(process)
        return [outcome]

    async def _score_one(self, process: Child, job: Job, request: bytes) -> tuple[Outcome, bool]:
        """Return the outcome of a sample, and whether the process can score another one."""
        try:
            result, more = await _ask(process, request, timeout=self._timeout)
            outcome = _outcome(result, job.sample_id)
            return outcome, not more and outcome.error_reason in ("", "RAISED")
        except TimeoutError:
            text = f"the program took longer than {self._timeout:g} s and was killed; raise reward.timeout_seconds"
            return Outcome.error("TIMEOUT", text), False
        except ProgramFault as error:
            return Outcome.error(error.reason, str(error)), False
        except (ValueError, RecursionError) as error:
            return Outcome.error("BAD_RESPONSE", f"the program's result: {error}"), False


async def _ask(process: Child, request: bytes, *, timeout: float) -> tuple[Any, bool]:
    """Send one line, without its end; return the JSON value of the answer, and whether another line followed it.

    Raises:
        ProgramFault: there is no such line. Kill the program then.
        TimeoutError: there is none within `timeout` seconds. Kill the program then.
    """
    process.send(request + b"\n")
    try:
        line, *more = await process.receive(timeout=timeout)
    except WorkerDied:
        rest = f" after {_excerpt(process.unread)}" if process.unread else ""
        cause = f"the program {await process.ended() or 'closed its stdout'}{rest}"
        raise ProgramFault("WORKER_DIED", cause) from None
    except ValueError as error:
        raise ProgramFault("BAD_RESPONSE", f"the program wrote {error}") from None
    try:
        return json.loads(line), bool(more)
    except (ValueError, RecursionError):
        raise ProgramFault("BAD_RESPONSE", f"the program wrote no JSON: {_excerpt(line)}") from None


def _excerpt(line: bytes) -> str:
    return repr(line[:200].decode(errors="replace"))


def _request(job: Job) -> bytes:
    """Return the line of a sample. Raises InvalidSample: its metadata is malformed."""
    texts = {"id": job.sample_id, "prompt": job.prompt, "completion": job.completion, "answer": job.answer}
    return to_json({**texts, "metadata": parse_metadata(job.metadata_json)}, ensure_ascii=True).encode()


def _outcome(result: Any, sample_id: str) -> Outcome:
    """Return the outcome that a line stands for. Raises ValueError: it stands for none."""
    if not isinstance(result, dict):
        if isinstance(result, bool) or not isinstance(result, int | float):
            raise ValueError(f"{result!r:.100} is neither a number nor an object")
        return outcome_of(result)
    if result.get("id", sample_id) != sample_id:
        raise ValueError(f"the id {result['id']!r:.100} where that of the sample, {sample_id!r}, belongs")
    values = {name: value for name, value in result.items() if name != "id"}
    if "error" in values:
        return Outcome.error("RAISED", clean(str(values["error"])))
    if "abstain" in values:
        return outcome_of(Abstain(str(values["abstain"])))
    if isinstance(values.get("score"), bool):
        raise ValueError(f"the score {values['score']}; it must be a number")
    return outcome_of(values)


def _find_program(name: str) -> Path:
    found = shutil.which(name)
    if found is not None:
        return Path(found).absolute()  # not `resolve`: the python of a virtual environment is a link
    path = Path(name)
    if path.is_file():
        raise ConfigError(
            f"reward.command: {name!r} is not executable; run `chmod +x {name}` and begin it with a line #!, or write "
            f'command = ["python", "{name}"]'
        )
    raise ConfigError(
        f"reward.command: there is no program {name!r}; name one of PATH, or a file relative to {Path.cwd()}"
    )


def _is_file(word: str) -> bool:
    try:
        return Path(word).is_file()
    except (OSError, ValueError):  # a word that is too long for a path
        return False


def _digest(files: Sequence[Path]) -> str:
    """Return the start of the SHA-256 of one file, or of the hashes of several."""
    try:
        hashes = [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]
    except OSError as error:
        raise WorkerDied(f"{error.filename} cannot be read: {error.strerror}") from None
    return (hashes[0] if len(hashes) == 1 else hashlib.sha256("".join(hashes).encode()).hexdigest())[:12]
