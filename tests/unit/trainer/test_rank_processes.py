"""Tests the placement of ranks and their errors without processes; tests/integration has real ranks."""

from __future__ import annotations

import os
import queue
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest
import torch

from fourfold.config import Config
from fourfold.errors import ConfigError, DeadlinePassed, Unavailable
from fourfold.host.network import NCCL_VARIABLE
from fourfold.host.postmortem import Death
from fourfold_trainer.batches import dummy_value_batch, to_arrays
from fourfold_trainer.engine import EngineFailedError
from fourfold_trainer.ranks import rank_processes
from fourfold_trainer.ranks.distributed_engine import DistributedEngine
from fourfold_trainer.ranks.local_ranks import LocalRanks
from fourfold_trainer.ranks.main import QueuedBatches
from fourfold_trainer.ranks.placement import collective_interface, place_ranks, rank_environment
from fourfold_trainer.ranks.rank_channel import BATCH, RankChannel, RankMessage
from fourfold_trainer.ranks.rank_processes import RankProcesses, SharedBatches
from fourfold_trainer.ranks.rank_worker import explain_failure
from tests.support.recipes import make_recipe


def recipe(**tables: Any) -> Config:
    return make_recipe(**{"trainer": {"ranks": 2, "device": "cuda"}, **tables})


def held(config: Config, *, critic: bool = False) -> list[tuple[int, int, str, int]]:
    return [(p.rank, p.rank_count, p.holds, p.gpu) for p in place_ranks(config, critic=critic)]


def test_a_critic_is_in_the_ranks_of_the_policy_or_on_gpus_after_them() -> None:
    assert held(recipe()) == [(0, 2, "policy", 0), (1, 2, "policy", 1)]
    shared = recipe(algorithm={"preset": "ppo"})
    assert held(shared) == [(0, 2, "both", 0), (1, 2, "both", 1)]
    apart = recipe(algorithm={"preset": "ppo"}, critic={"ranks": 3})
    assert held(apart) == [(0, 2, "policy", 0), (1, 2, "policy", 1)]
    assert held(apart, critic=True) == [(0, 3, "critic", 2), (1, 3, "critic", 3), (2, 3, "critic", 4)]
    last = rank_environment(apart, place_ranks(apart, critic=True)[2])
    assert (last["RANK"], last["WORLD_SIZE"], last["LOCAL_RANK"]) == ("2", "3", "4")
    assert (last["NCCL_SOCKET_IFNAME"], last["GLOO_SOCKET_IFNAME"]) == ("=lo", "lo"), "gloo takes names alone"


def test_nccl_has_the_network_of_the_service_also_on_one_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NCCL_VARIABLE, "=eth1")  # as the service sets it
    found = rank_environment(recipe(), place_ranks(recipe(), critic=False)[0])
    assert (found["NCCL_SOCKET_IFNAME"], found["GLOO_SOCKET_IFNAME"]) == ("=eth1", "lo")


def test_memory_of_a_trainer_without_engines_is_not_cut_into_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)

    def allocator(config: Config) -> str | None:
        return rank_environment(config, place_ranks(recipe(), critic=False)[0]).get("PYTORCH_ALLOC_CONF")

    rows = cast(Config, Mock(wraps=recipe(), needs_engines=False, trainer=recipe().trainer))
    assert allocator(rows) == "expandable_segments:True"
    assert allocator(recipe()) is None, "CUDA IPC cannot send the weights of such memory"
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:512")
    assert allocator(rows) is None, "the user's"


def test_an_address_of_no_interface_advises_to_name_one() -> None:
    assert collective_interface("203.0.113.1", "eth1") == "eth1"
    with pytest.raises(ConfigError, match=r"address 203\.0\.113\.1; it has .*lo.*; name an interface with --interface"):
        collective_interface("203.0.113.1", "")


def group(second: ThreadPoolExecutor | None) -> DistributedEngine:
    """Return an engine without ranks."""
    made = object.__new__(DistributedEngine)
    made._critic_executor = second
    return made


def test_calls_for_a_critic_apart_run_beside_those_for_the_policy() -> None:
    meeting, met = threading.Barrier(2, timeout=30), list[int]()
    with ThreadPoolExecutor(1) as second:
        assert group(second).in_parallel(lambda: met.append(meeting.wait()), meeting.wait) != met[0]


def test_an_error_of_either_is_raised_when_both_have_ended() -> None:
    ended: list[str] = []

    def fail(name: str) -> None:
        ended.append(name)
        raise Unavailable(name)

    with ThreadPoolExecutor(1) as second:
        with pytest.raises(Unavailable, match="policy"):
            group(second).in_parallel(lambda: ended.append("critic"), lambda: fail("policy"))
        with pytest.raises(Unavailable, match="critic"):
            group(second).in_parallel(lambda: fail("critic"), lambda: ended.append("policy"))
    assert sorted(ended) == ["critic", "critic", "policy", "policy"]


def test_calls_in_shared_ranks_take_turns_the_critic_first() -> None:
    order: list[str] = []
    group(None).in_parallel(lambda: order.append("critic"), lambda: order.append("policy"))
    assert order == ["critic", "policy"]


def process_group(*channels: RankChannel) -> RankProcesses:
    """Return a group whose ranks are the other ends of these channels."""
    made = object.__new__(RankProcesses)
    made._config, made._timeout, made._sequence = recipe(), 0.05, 0
    made._local, made._remote = cast(Any, SimpleNamespace(death="")), None
    made.channels, made.worker, made.change_count = list(channels), None, 0
    return made


def test_a_broken_link_without_a_death_is_no_error_for_a_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_processes, "_BLAME_SECONDS", 0.0)
    left, right = socket.socketpair()
    group = process_group(RankChannel(left))
    right.close()
    with pytest.raises(EngineFailedError, match="compute_logprobs: the rank channel broke while sending"):
        group.call("compute_logprobs")
    assert group.change_count == 0
    with pytest.raises(EngineFailedError, match="update_policy: the rank channel broke"):
        group.call("update_policy")
    assert group.change_count == 1, "some rank may have got the command"
    left.close()


def test_a_rank_that_does_not_answer_ends_all_but_transfers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_processes, "_BLAME_SECONDS", 0.0)
    left, right = socket.socketpair()
    with left, right:
        group = process_group(RankChannel(left))
        with pytest.raises(EngineFailedError, match="save: the other end of the rank channel did not answer in time"):
            group.call("save")
        with pytest.raises(DeadlinePassed):  # aborted, and the next epoch may do
            group.request("send_weights", fields={}, timeout=0.05)


class Noting:
    """A channel that keeps what is sent, and breaks at one message."""

    def __init__(self, breaks_at: int = -1) -> None:
        self.sent, self._breaks_at = list[RankMessage](), breaks_at

    def send(self, message: RankMessage) -> None:
        if len(self.sent) == self._breaks_at:
            self._breaks_at = -1
            raise Unavailable("the rank channel broke")
        self.sent.append(message)


def shared(*channels: Noting, batches: int) -> SharedBatches:
    shares = [[dummy_value_batch() for _ in range(batches)] for _ in range(1 + len(channels))]
    return SharedBatches(cast(Any, channels), shares, sequence=7)


def test_a_rank_gets_its_batches_while_rank_0_reads_one_ahead_of_it() -> None:
    """All at once, they would take several times the memory of the samples."""
    first, second = Noting(), Noting()
    batches = shared(first, second, batches=4)
    counts = [(len(first.sent), len(second.sent)) for _ in batches]
    assert len(batches) == 4 and counts == [(2, 2), (3, 3), (4, 4), (4, 4)]
    batches.send_rest()
    assert [(m.name, m.sequence) for m in first.sent] == [(BATCH, 7)] * 4
    expected = [array.tolist() for array in to_arrays(dummy_value_batch())]
    assert [array.tolist() for array in second.sent[3].arrays] == expected


def test_a_rank_gets_the_batches_that_rank_0_did_not_read() -> None:
    other = Noting()
    batches = shared(other, batches=5)
    next(iter(batches))
    batches.send_rest()
    assert len(other.sent) == 5


def test_nothing_follows_a_message_that_broke_a_channel() -> None:
    """It would be read as the rest of that message. The worker of rank 0 turns the error into an answer."""
    other = Noting(breaks_at=2)
    batches = shared(other, batches=5)
    with pytest.raises(Unavailable, match="the rank channel broke"):
        list(batches)
    with pytest.raises(Unavailable, match="the rank channel broke"):
        batches.send_rest()
    assert len(other.sent) == 2


def test_batches_that_do_not_come_are_an_error_with_a_deadline() -> None:
    messages: queue.SimpleQueue[RankMessage] = queue.SimpleQueue()
    messages.put(RankMessage(name=BATCH, arrays=to_arrays(dummy_value_batch())))
    batches = iter(QueuedBatches(3, messages, timeout=0.01))
    assert len(next(batches)) == len(to_arrays(dummy_value_batch()))
    with pytest.raises(DeadlinePassed, match="did not send micro-batch 2 of 3 in trainer"):
        next(batches)
    messages.put(RankMessage(name="close"))
    with pytest.raises(Unavailable, match="sent close instead of micro-batch 1 of 2"):
        next(iter(QueuedBatches(2, messages, timeout=0.01)))
    assert messages.get_nowait().name == "close", "the rank still ends"


def test_a_signal_to_all_processes_leaves_the_ranks_to_rank_0(tmp_path: Path) -> None:
    ranks = LocalRanks(run_dir=tmp_path, name="trainer-0", on_death=lambda _reason: None)
    try:
        (connection,) = ranks.start([1], timeout=60)
        child = ranks._supervisor.children["trainer-0-rank-1"]
        with connection:
            for number in (signal.SIGTERM, signal.SIGINT):
                os.kill(child.pid, number)
            time.sleep(0.3)
            assert child.alive
    finally:
        ranks.close()
    assert not child.alive


class Dying:
    """A supervisor one of whose children has died."""

    def deaths(self) -> list[Death]:
        return [
            Death(
                name="trainer-0-rank-1", time=0.0, exit_code=0, signal=9, oom_kills=0, was_ready=False, log="x.log",
                last_lines=(),
            )
        ]  # fmt: skip


# What PyTorch 2.11 says when an allocation fails.
FACTS = (
    "Tried to allocate 2.25 GiB. GPU 1 has a total capacity of 79.11 GiB of which 1.53 GiB is free. Process 4000 has "
    "11.60 GiB memory in use. Process 4001 has 4.90 GiB memory in use. Including non-PyTorch memory, this process has "
    "61.08 GiB memory in use. Of the allocated memory 58.20 GiB is allocated by PyTorch, and 1.10 GiB is reserved by "
    "PyTorch but unallocated"
)
OUT_OF_MEMORY = (
    f"CUDA out of memory. {FACTS}. If reserved but unallocated memory is large try setting PYTORCH_ALLOC_CONF"
)
FAILING_RANK = """
import sys, torch
from fourfold_trainer.ranks.main import run_rank
from fourfold_trainer.ranks.rank_worker import RankWorker

def fail(command):
    raise torch.OutOfMemoryError({text!r})

def make(start, config):
    worker = object.__new__(RankWorker)
    worker._config, worker._commands = config, {{"update_policy": fail}}
    return worker

sys.exit(run_rank(make))
"""
SHARED = {
    "model": {"dtype": "bfloat16"},
    "batch": {"tokens_per_micro_batch": 73728},
    "rollout": {"replicas": 2, "gpus_per_replica": 1, "kv_cache_gib": 9},
    "reference": {"replicas": 2, "device": "cuda", "tokens_per_batch": 73728},
    "algorithm": {"kl": {"coef": 0.001}},
    "placement": {"colocated": True},
}


def test_a_rank_without_memory_says_what_holds_it_and_which_keys_help(tmp_path: Path) -> None:
    told: queue.Queue[str] = queue.Queue()
    made, config = LocalRanks(run_dir=tmp_path, name="trainer-0", on_death=told.put), recipe(**SHARED)
    made.loaded.set()
    try:
        program = ("-c", FAILING_RANK.format(text=OUT_OF_MEMORY))
        (connection,) = made.start([1], timeout=60, program=program, env={"CUDA_VISIBLE_DEVICES": "4,5"})
        with connection:
            channel = RankChannel(connection)
            channel.send(RankMessage(name="start", fields={"config": config.model_dump(mode="json")}))
            channel.receive(timeout=60)
            channel.send(RankMessage(name="update_policy"))
            said = told.get(timeout=60)
    finally:
        made.close()
    assert said.startswith(
        f"trainer-0-rank-1 died: ended with exit code 1: out of memory: {FACTS.replace('GPU 1', 'GPU 5')}; lower "
        "batch.tokens_per_micro_batch = 73728 or rollout.kv_cache_gib = 9 or reference.tokens_per_batch = 73728, or "
        "set trainer.gradient_checkpointing = true, or set rollout.sleep_mode = true"
    )
    table = {"name": "judge", "model": {"source": "m", "device": "cuda", "tokens_per_batch": 4096}}
    text = explain_failure(MemoryError(), recipe(**SHARED, reward=[table]))
    assert " or [[reward]] 'judge'.model.tokens_per_batch = 4096, or set " in text
    assert explain_failure(RuntimeError("NCCL error\nsee its log"), config) == "RuntimeError: NCCL error see its log"
    alone = recipe(trainer={"ranks": 1, "device": "cuda", "gradient_checkpointing": True})
    text = explain_failure(torch.OutOfMemoryError("a text of another release"), alone)
    assert text == "out of memory: a text of another release; lower batch.tokens_per_micro_batch = 4096"
    assert explain_failure(MemoryError(), alone) == "MemoryError; lower batch.tokens_per_micro_batch = 4096"


@pytest.mark.parametrize(("loaded", "words"), [(True, "died: "), (False, "died before it was ready: ")])
def test_a_rank_that_dies_in_training_was_ready(loaded: bool, words: str, tmp_path: Path) -> None:
    told: list[str] = []
    made = LocalRanks(run_dir=tmp_path, name="trainer-0", on_death=told.append)
    made._supervisor = cast(Any, Dying())
    if loaded:
        made.loaded.set()
    made._watch()
    made.scratch.remove()
    assert told[0].startswith(f"trainer-0-rank-1 {words}killed by SIGKILL; its sender is unknown")
