"""`fourfold serve coordinator`: creates the parts of a run and drives the run to its end.

    listen -> tokenizer -> coordinator.address, so that services can register
           -> prompts (takes seconds, while the services load their models) -> training loop -> exit code

The exit code is 0 when report.json is written, or was before. It is 1 when the run failed: then the reason is the last
line on stderr, and in the last status that `WatchRun` sends.
"""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import sqlite3
import sys
import time
import uuid
from collections.abc import Coroutine, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import grpc
import numpy as np
from google.protobuf.descriptor import ServiceDescriptor

from fourfold.address import is_loopback, split_target
from fourfold.arrays import Int32Array
from fourfold.config import dump
from fourfold.coordinator.v1 import (
    experience_service_pb2,
    membership_service_pb2,
    rendezvous_service_pb2,
    run_file_service_pb2,
    run_service_pb2,
    scorer_service_pb2,
)
from fourfold.coordinator.v1.experience_service_pb2_grpc import add_ExperienceServiceServicer_to_server
from fourfold.coordinator.v1.membership_service_pb2 import Role
from fourfold.coordinator.v1.membership_service_pb2_grpc import add_MembershipServiceServicer_to_server
from fourfold.coordinator.v1.rendezvous_service_pb2_grpc import add_RendezvousServiceServicer_to_server
from fourfold.coordinator.v1.run_file_service_pb2_grpc import add_RunFileServiceServicer_to_server
from fourfold.coordinator.v1.run_service_pb2_grpc import add_RunServiceServicer_to_server
from fourfold.coordinator.v1.scorer_service_pb2_grpc import add_ScorerServiceServicer_to_server
from fourfold.errors import ConfigError, FourfoldError, Internal
from fourfold.host.clock import SYSTEM_CLOCK
from fourfold.host.disk import check_room
from fourfold.host.process_tree import PARENT_PID_VARIABLE
from fourfold.model import folder as model_folder
from fourfold.model.tokenizer import Tokenizer
from fourfold.rpc.channel import open_channel
from fourfold.security.principal import Principal
from fourfold.service.lifecycle import ServeOptions, ServiceHost

from .cli.console import RunConsole
from .cli.summary import report_lines
from .data.load_prompts import load_prompts
from .data.prompts import PromptSet
from .launch.run_folder import is_finished, locked, read_stop_reason, write_stop_reason
from .launch.run_names import (
    ADDRESS_FILE,
    CONFIG_FILE,
    COORDINATOR_LOCK,
    DEATH_VARIABLE,
    LEDGER_FILE,
    REPORT_FILE,
    SAMPLING_FILE,
)
from .reporting.lineage import keep_lineage, origin_digests, read_lineage
from .reporting.metrics_source import RunSource
from .reporting.run_files import RunFileServicer
from .reporting.run_service import RunServicer
from .reporting.run_totals import RunTotals
from .rewards.scorers import COSTS_KEY, STATE_KEY, ScorerTable
from .rewards.scoring import Scoring
from .rewards.servicer import ScorerServicer
from .rewards.shadows import Shadows
from .routing.membership import CertificateMonitor, MembershipServicer
from .routing.registry import Member, MemberChange, Registry
from .routing.rendezvous import RendezvousServicer
from .routing.router import MemberState, Router, rest_after
from .routing.trainer_session import TrainerSession
from .rows.open_rows import STORES_KEY, OpenRows, open_rows
from .sinks.sink import check_sinks
from .sinks.supervisor import SinkProcesses
from .state.experiences import FOLDER as EXPERIENCES_FOLDER
from .state.experiences import ExperienceStore
from .state.faults import FaultLog
from .state.files import DiskWriter, replace_file
from .state.ledger import Ledger
from .state.recipe_history import RecipeHistory, describe_changes
from .state.run_board import RunBoard
from .state.sample_traces import SampleTraces
from .state.segments import SegmentFiles
from .state.timeline import Timeline
from .tasks.servicer import ExperienceServicer, TaskSource
from .tasks.task_queue import TaskQueue
from .training.context import RunContext
from .training.evaluation.evaluator import Evaluator
from .training.evaluation.prompt_rows import StandaloneSampling
from .training.evaluation.row_evaluator import RowEvaluator
from .training.evaluation.standalone import StandaloneEvaluation
from .training.live_recipe import LiveRecipe
from .training.loop import TrainingLoop
from .training.ports import WeightPublisher
from .training.prepared_reference import PreparedReference
from .training.producer import GroupProducer
from .training.row_feed import RowFeed
from .training.service_calls import ServiceCalls
from .training.standstill import StandstillMonitor
from .training.teacher import Teacher
from .weights.broker import WeightBroker
from .weights.loaded_model import LoadedModel
from .weights.no_engines import NoEngines
from .weights.status import WeightPlaneStatus

log = logging.getLogger("fourfold.coordinator")

_PROMPTS_KEY: Final = "prompts_sha256"
_DATA_KEYS: Final = ("data", "model", "seed")  # tables and keys of a recipe from which its prompts follow
_RUN_ID_KEY: Final = "run_id"
_TRACING: Final = "tracing"  # subject of a condition on the board
_PROBE_TEXT: Final = "The quick brown fox jumps over the lazy dog."
# The first wait is the longest: services load models at the start, and users start some of them by hand.
_START_SECONDS: Final = 900.0
_TICK_SECONDS: Final = 0.25
# With one acceptor, the renewals of a thousand leases waited for more than ten seconds while samples arrived.
_ACCEPTORS: Final = 32
# Thresholds of the garbage collector. With Python's default (700, 10, 10) it took a fifth of the event loop's time
# while samples arrived, and visited every sample in memory many times in a step.
_GC_THRESHOLDS: Final = (20_000, 5, 1_000)


def main(options: ServeOptions) -> int:
    """Run the coordinator; return the exit code. A finished run exits at once."""
    folder = options.make_folder()
    with locked(folder / COORDINATOR_LOCK, "coordinator"):
        if is_finished(folder, options.config):
            sys.stdout.write(
                f"{folder} is finished already: its report is {folder / REPORT_FILE}. Raise steps to train further, or "
                f"give --run-dir for another run.\n"
            )
            return 0
        write_stop_reason(folder, "")  # forget the stop reason of an earlier start
        check_sinks(options.config.logging.sinks)
        if warning := check_room(folder):
            log.warning("%s", warning)
        if not (folder / CONFIG_FILE).exists():  # started by hand, not by the launcher
            replace_file(folder / CONFIG_FILE, [dump(options.config)])
        host, _ = split_target(options.listen)
        if options.config.security.directory and is_loopback(host) and PARENT_PID_VARIABLE not in os.environ:
            log.warning(
                "the coordinator listens on %s, where services of other machines cannot reach it; pass --listen "
                "ADDRESS:PORT if the run has any",
                host,
            )
        if sys.stdout.isatty():  # started by hand
            sys.stdout.write(f"Run folder: {folder} (log: {folder / 'logs' / options.member_id}.log)\n")
        code = asyncio.run(Coordinator(options, folder).run())
        if sys.stdout.isatty() and not options.evaluate and is_finished(folder, options.config):
            sys.stdout.write("\n".join(report_lines(folder)) + "\n")
        return code


class Coordinator:
    """One coordinator process: its server, background tasks and training loop."""

    def __init__(self, options: ServeOptions, folder: Path, *, start_seconds: float = _START_SECONDS) -> None:
        """Create the parts that need no service.

        `start_seconds` limits the wait for services at the start, unless retry.service_wait_seconds is longer.
        """
        config = options.config
        self._config, self._folder, self._member_id = config, folder, options.member_id
        self._recipe, self._evaluate = options.recipe, options.evaluate
        self._samples = options.evaluate and (folder / SAMPLING_FILE).is_file()
        self._reads_train = self._samples or not self._evaluate
        self._assignments = options.assignments
        self._start_seconds = max(start_seconds, config.retry.service_wait_seconds)
        self._host = ServiceHost(options, role=None, acceptors=_ACCEPTORS)
        log.info("coordinator started: folder=%s recipe=%s sqlite=%s", folder, options.recipe, sqlite3.sqlite_version)
        folder_of_model = model_folder.resolve(config.model.source, config.data.chat_template)
        self._tokenizer = Tokenizer.load(folder_of_model, date=config.data.date)
        self._board = RunBoard(
            name=config.name, step_count=config.steps, max_policy_lag=config.asynchrony.max_policy_lag
        )
        self._disk = DiskWriter(folder, self._board, wait_seconds=config.retry.service_wait_seconds)
        timeline = Timeline()
        self._weight_status = WeightPlaneStatus(timeline=timeline)
        self._registry = Registry(
            clock=SYSTEM_CLOCK,
            tokenizer_sha256=self._tokenizer.sha256,
            security=self._host.security,
            # A reward service that names no scorer serves the first scorer that needs services.
            scorers=[table.name for table in sorted(config.reward, key=lambda table: bool(table.target))],
        )
        self._router = Router(
            self._registry,
            open_channel=self._open_channel,
            wait_seconds=config.retry.service_wait_seconds,
            on_wait=self._board.set_waiting_for,
            faults=FaultLog(report=self._board.report_condition, resolve=self._board.resolve_condition),
            timeline=timeline,
            traces=SampleTraces(ratio=config.tracing.sample_ratio),
        )
        self._run_source = RunSource(self._board, self._router.faults, folder / LEDGER_FILE)
        self._host.exporter.add(self._run_source.read, refresh=self._run_source.refresh)
        self._certificates = CertificateMonitor(self._host.security, self._registry, self._board, own=options.member_id)
        self._scorers = ScorerTable(config, self._registry, self._router)
        self._scoring = Scoring(config, self._router, self._scorers, run=folder.name)
        self._scorer_servicer = ScorerServicer(self._scorers, self._router)
        self._tasks = TaskQueue(config.agents, max_refusals=config.retry.data, max_releases=config.retry.infrastructure)
        self._standstill = StandstillMonitor(
            config, self._board, self._router, tasks=self._tasks, weights=self._weight_status, disk=self._disk
        )
        self._left_gateways: set[str] = set()
        self._registry.add_listener(self._on_member)
        self._experience_servicer = ExperienceServicer()
        self._add_servicers()

    def _add_servicers(self) -> None:
        """Add all services to the server, and those for viewers to the public one, if there is one."""
        tokenizer = model_folder.resolve(self._config.model.source, self._config.data.chat_template) / "tokenizer.json"
        files = RunFileServicer(self._folder, tokenizer)
        run = RunServicer(self._board, lambda: self._weight_status.to_proto(self._router.replicas()))
        members = MembershipServicer(self._registry, self._certificates)
        rendezvous = RendezvousServicer(self._host.security)
        servers = [self._host.server]
        if listen := self._config.view.public_listen:
            servers.append(self._host.public_server(listen, "view.public_listen"))
        for server in servers:
            server.add(_service(run_service_pb2), add_RunServiceServicer_to_server, run)
            server.add(_service(run_file_service_pb2), add_RunFileServiceServicer_to_server, files)
        server = self._host.server
        server.add(_service(membership_service_pb2), add_MembershipServiceServicer_to_server, members)
        server.add(_service(rendezvous_service_pb2), add_RendezvousServiceServicer_to_server, rendezvous)
        server.add(_service(scorer_service_pb2), add_ScorerServiceServicer_to_server, self._scorer_servicer)
        server.add(_service(experience_service_pb2), add_ExperienceServiceServicer_to_server, self._experience_servicer)

    def _on_member(self, member: Member, change: MemberChange) -> None:
        """Return the tasks of an environment service or a gateway that has left.

        The next process of a gateway restores the sessions and names their tasks (`RenewTasks`).
        """
        if member.role == Role.ROLE_ENVIRONMENT:
            joined = change is MemberChange.JOINED
            (self._tasks.on_agent_joined if joined else self._tasks.on_agent_left)(member.incarnation)
        if member.role == Role.ROLE_GATEWAY and change is not MemberChange.REPLACED:
            self._left_gateways.add(member.member_id)
            live = {each.member_id for each in self._registry.members(Role.ROLE_GATEWAY)}
            self._left_gateways -= live
            if live:  # without another gateway, the tasks wait for its next process, which restores their sessions
                for name in self._left_gateways:
                    self._tasks.return_tasks(name)

    def _open_channel(self, member: Member) -> grpc.aio.Channel:
        """Open a channel to a member; with certificates, only a server with the member's identity is accepted.

        The recipe has the address of a permanent member, not its name: any server of its role is accepted there.
        """
        name = "" if member.permanent else member.member_id
        return open_channel(member.target, self._host.security, server=Principal(member.role_name, name))

    async def run(self) -> int:
        """Serve until the run is over; return the exit code."""
        out = sys.stdout if sys.stdout.isatty() else None
        displays = [asyncio.create_task(d.run()) for d in (RunConsole(self._board, out=out), self._standstill)]
        for display in displays:  # apart from `background`, because an error of a display must not end the run
            display.add_done_callback(_log_fault)
        try:
            return await self._host.run(start=self._announce, until=self._drive())
        finally:
            for display in displays:
                display.cancel()
            await asyncio.wait(displays)

    async def _announce(self) -> None:
        await self._disk.write(replace_file, self._folder / ADDRESS_FILE, [self._host.target + "\n"])

    async def _drive(self) -> int:
        """Run the training loop to its end, and report the outcome to watchers."""
        ledger: Ledger | None = None
        try:
            ledger = await self._disk.write(Ledger, self._folder / LEDGER_FILE)
            segments = await self._disk.write_in_thread(SegmentFiles, self._folder / EXPERIENCES_FOLDER)
            if ledger.counts():
                self._board.set_recovering(ledger.last_checkpoint())
            await self._loop(ledger, ExperienceStore(segments, ledger, self._disk))
        except FourfoldError as error:
            self._board.close(failure=error.message)
            raise
        except Exception as error:  # a bug ends the run and is shown to watchers
            log.exception("training loop failed")
            self._board.close(failure=f"internal error: {error!r}")
            raise Internal(f"internal error: {error!r}; the log has the traceback") from error
        except asyncio.CancelledError:  # after a signal, the watchers' streams end with this status
            self._board.close(stopped=self._stopped())
            raise
        finally:
            if ledger is not None:
                ledger.close()
        self._board.close()
        return 0

    def _stopped(self) -> str:
        """Return the reason of this process's stop and the last step; log it, and store it for `fourfold watch`."""
        if not (reason := read_stop_reason(self._folder)):
            reason = self._host.signal_name or "a call to drain"
            write_stop_reason(self._folder, reason)
        text = f"stopped by {reason} after step {self._board.status.step}"
        log.warning("%s", text)
        return text

    async def _loop(self, ledger: Ledger, experiences: ExperienceStore) -> None:
        totals = RunTotals(
            ledger,
            members=self._registry.members,
            coordinator=self._member_id,
            death=os.environ.get(DEATH_VARIABLE, ""),
        )
        self._registry.add_listener(totals.on_member)
        await self._restore_scorers(ledger)
        self._run_source.totals = totals
        await self._disk.write(totals.save)
        sinks = SinkProcesses(self._config, self._folder, self._board)
        background = [
            asyncio.create_task(self._router.run()),
            asyncio.create_task(self._show_members()),
            asyncio.create_task(totals.memory.run()),
            asyncio.create_task(self._certificates.run()),
            asyncio.create_task(totals.run()),
            asyncio.create_task(self._tasks.run()),
            asyncio.create_task(sinks.run()),
        ]
        self._router.faults.load(ledger)
        try:
            config_file = self._folder / CONFIG_FILE
            history = RecipeHistory(ledger, self._disk, config_file, self._recipe, self._assignments)
            rows = None if self._config.needs_engines else await self._open_rows(ledger, history)
            lineage = asyncio.create_task(self._record_lineage(ledger))  # while services load the same files
            context = await self._assemble(ledger, experiences, totals, history)
            await lineage
            gc.collect()
            gc.freeze()  # exclude modules and prompts, which live as long as the process
            gc.set_threshold(*_GC_THRESHOLDS)
            if self._evaluate:
                background.append(asyncio.create_task(LoadedModel(context.router).run()))
                if self._samples:
                    work = StandaloneSampling(context, origin_digests(ledger, config_file)).run()
                else:
                    work = StandaloneEvaluation(context, self._evaluator(context), self._tokenizer).run()
            else:
                if isinstance(context.broker, WeightBroker):
                    background.append(asyncio.create_task(context.broker.run()))
                recipe = LiveRecipe(self._recipe, self._config, history.assignments)
                work = self._training_loop(context, recipe, history, rows).run()
            await first_of(work, background)
            await sinks.finish()
        finally:
            for task in background:
                task.cancel()
            await asyncio.gather(*background, return_exceptions=True)
            experiences.close()

    def _training_loop(
        self, context: RunContext, recipe: LiveRecipe, history: RecipeHistory, rows: OpenRows | None
    ) -> TrainingLoop:
        """Return the loop, which takes its samples from engines or, with `rows`, from the data."""
        if rows is None:
            return TrainingLoop(context, GroupProducer(context), recipe, history, self._evaluator(context))
        config, train, references = self._config, None, dict[str, PreparedReference]()
        if config.prepares_reference:
            train = PreparedReference(context, rows.train)
            references = {s.name: PreparedReference(context, s.steps(config), s.name) for s in rows.held_out}
        attach = {name: each.attach for name, each in references.items()}
        evaluator = RowEvaluator(rows.held_out, context.session, config, attach)
        teacher = None
        if config.algorithm.loss.teacher_tokens:
            vocabulary = model_folder.shape(config.model.source).vocabulary
            teacher = Teacher(context.service_calls, config, vocabulary_size=vocabulary)
        feed = RowFeed(rows.train, train, teacher, held_out=references.values())
        return TrainingLoop(context, feed, recipe, history, evaluator)

    def _evaluator(self, context: RunContext) -> Evaluator:
        return Evaluator(
            self._config,
            context.prompts.held_out,
            service_calls=context.service_calls,
            tasks=self._tasks,
            run_all=context.session.run_all,
        )

    async def _restore_scorers(self, ledger: Ledger) -> None:
        """Continue with the scorers of an earlier coordinator process, or with those of the recipe."""

        async def save(state: str) -> None:
            await self._disk.write(ledger.put, {STATE_KEY: state})
            await self._disk.write_in_thread(ledger.sync)

        try:
            self._scorers.restore_costs(ledger.get(COSTS_KEY))
            self._scorers.restore(ledger.get(STATE_KEY), save)
        except ConfigError as error:
            raise ConfigError(f"reward.target: {error}") from None

    async def _assemble(
        self, ledger: Ledger, experiences: ExperienceStore, totals: RunTotals, history: RecipeHistory
    ) -> RunContext:
        """Return the objects of the run."""
        config = self._config
        prompts = await self._load_prompts(ledger, history)
        router = self._router
        session = TrainerSession(router, config, self._board)
        run_id = ledger.get(_RUN_ID_KEY) or uuid.uuid4().hex
        await self._disk.write(ledger.put, {_RUN_ID_KEY: run_id})
        router.traces.follow(ledger, run_id)
        self._experience_servicer.open(
            TaskSource(
                config=config,
                run_id=run_id,
                queue=self._tasks,
                experiences=experiences,
                faults=self._router.faults,
                vocabulary_size=lambda: max((r.vocabulary_size for r in router.replicas(Role.ROLE_ROLLOUT)), default=0),
                newest_version=ledger.highest_version,
            )
        )
        shadows = Shadows(self._scorers, self._scoring)
        self._scorer_servicer.open(self._scoring, shadows)
        return RunContext(
            config=config,
            folder=self._folder,
            prompts=prompts,
            ledger=ledger,
            experiences=experiences,
            disk=self._disk,
            board=self._board,
            router=router,
            session=session,
            broker=self._publisher(ledger, session, prompts),
            service_calls=ServiceCalls(
                config,
                router,
                self._tokenizer.decode_batch,
                self._scoring,
                newest_version=ledger.highest_version,
                stop_token_ids=self._tokenizer.stop_token_ids,
            ),
            scorers=self._scorers,
            shadows=shadows,
            tasks=self._tasks,
            certificates=self._certificates,
            totals=totals,
            start_seconds=self._start_seconds,
        )

    def _publisher(self, ledger: Ledger, session: TrainerSession, prompts: PromptSet) -> WeightPublisher:
        """Return what sends weights to the engines, or its stand-in without engines."""
        if not self._config.needs_engines:
            return NoEngines()
        return WeightBroker(
            self._config,
            self._router,
            session,
            ledger,
            disk=self._disk,
            probe_ids=self._probe_ids(prompts),
            status=self._weight_status,
        )

    async def _record_lineage(self, ledger: Ledger) -> None:
        """Store the digests of the models that the run begins with; raise ConfigError if they have changed."""
        if self._reads_train:
            found = await asyncio.to_thread(read_lineage, self._config)
            await self._disk.write(keep_lineage, ledger, found)

    async def _open_rows(self, ledger: Ledger, history: RecipeHistory) -> OpenRows:
        """Open the rows to train on; raise ConfigError when they cannot be used, or the run began with others."""
        rows = await asyncio.to_thread(open_rows, self._config, self._tokenizer)
        for warning in rows.warnings:
            log.warning("data: %s", warning)
        digest, changes = await asyncio.to_thread(rows.digest), history.changes(self._config)
        await self._disk.write(check_same_data, digest, ledger, changes)
        await self._disk.write(ledger.put, {STORES_KEY: json.dumps(rows.folders())})
        return rows

    async def _load_prompts(self, ledger: Ledger, history: RecipeHistory) -> PromptSet:
        """Read the data; raise ConfigError when a scorer cannot score them, or the run began with other data.

        A run of rows has no prompts.
        """
        if not self._config.needs_engines:
            return PromptSet(train=(), held_out=(), seed=self._config.seed)
        prompts = await asyncio.to_thread(load_prompts, self._config, self._tokenizer, train=self._reads_train)
        for warning in (*prompts.warnings, *await asyncio.to_thread(self._scoring.check_prompts, prompts)):
            log.warning("data: %s", warning)
        digest, changes = await asyncio.to_thread(prompts.digest), history.changes(self._config)
        await self._disk.write(check_same_data, digest, ledger, changes)
        return prompts

    def _probe_ids(self, prompts: PromptSet) -> Int32Array:
        """Return the tokens that engines and trainer compare after an update: a prompt, or else a fixed text."""
        if prompts.train:
            return prompts.train[0].token_ids
        return np.asarray(self._tokenizer.encode(_PROBE_TEXT), np.int32)

    async def _show_members(self) -> None:
        shown: list[MemberState] = []
        while True:
            began = time.perf_counter()
            if (members := self._router.members()) != shown:
                shown = members
                self._board.set_members(member.to_proto() for member in members)
            self._show_tracing()
            await rest_after(began)
            await self._router.wait_for_change(timeout=_TICK_SECONDS)

    def _show_tracing(self) -> None:
        if text := self._host.tracing.condition:
            self._board.report_condition(_TRACING, text)
        else:
            self._board.resolve_condition(_TRACING)


def _service(module: ModuleType) -> ServiceDescriptor:
    """Return the only service of a generated module."""
    service: ServiceDescriptor
    (service,) = module.DESCRIPTOR.services_by_name.values()
    return service


def check_same_data(digest: str, ledger: Ledger, changes: Mapping[str, tuple[Any, Any]]) -> None:
    """Store the digest of the run's prompts; raise ConfigError when the run began with other data.

    The ledger stores a position in the data, which is meaningless in other data. `changes` are those of the recipe.
    """
    known = ledger.get(_PROMPTS_KEY)
    if known and known != digest:
        keys = {key: values for key, values in changes.items() if key.partition(".")[0] in _DATA_KEYS}
        what = describe_changes(keys) or "files, tokenizer, chat template or reasoning-gym changed, and no key"
        raise ConfigError(
            f"the data differs from the data that the run began with: {what}; restore it, or start a new run"
        )
    ledger.put({_PROMPTS_KEY: digest})


def _log_fault(display: asyncio.Task[None]) -> None:
    if not display.cancelled() and (error := display.exception()) is not None:
        log.error("display failed; the run continues without it", exc_info=error)


async def first_of(main: Coroutine[Any, Any, None], background: Sequence[asyncio.Task[None]]) -> None:
    """Await `main`. When a background task fails first, cancel `main` and raise that error."""
    task = asyncio.ensure_future(main)
    try:
        await asyncio.wait([task, *background], return_when=asyncio.FIRST_COMPLETED)
        failed = next((b for b in background if b.done() and not b.cancelled()), None)
        if not task.done() and failed is not None:
            await failed
        await task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
