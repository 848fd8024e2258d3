"""Tests the choice of a backend for each engine, from the descriptions of trainer and engines."""

from __future__ import annotations

from typing import Any, cast

import pytest

from fourfold.coordinator.v1.membership_service_pb2 import Role
from fourfold.errors import NO_BACKEND
from fourfold.rollout.v1 import rollout_control_service_pb2 as control
from fourfold.trainer.v1 import trainer_weight_service_pb2 as weight
from fourfold_coordinator.routing.registry import Member
from fourfold_coordinator.weights.backends import BackendGroup, group_by_backend
from fourfold_coordinator.weights.fan_out import DescribedEngine, UpdateFailed

ALL = ["cuda_ipc", "nccl", "shm", "gloo"]
ANYWHERE = ["shm", "gloo"]


def gpus(*numbers: int) -> list[bytes]:
    return [bytes([number]) * 16 for number in numbers]


def trainer(*own: int, reachable: tuple[int, ...] = (), **more: Any) -> weight.GetManifestResponse:
    """On the host "here", with one rank on each GPU of `own`."""
    fields = {"host_id": "here", "backends": ALL if own else ANYWHERE, **more}
    return weight.GetManifestResponse(device_uuids=gpus(*own), reachable_device_uuids=gpus(*own, *reachable), **fields)


class _Replica:
    def __init__(self, name: str, target: str) -> None:
        self.member = Member(
            member_id=name, incarnation="1", role=Role.ROLE_ROLLOUT, target=target, tokenizer_sha256=b""
        )
        self.key = (name, "1")


def engine(name: str, *own: int, target: str = "x:1", **more: Any) -> DescribedEngine:
    """On the host "here", with one worker on each GPU of `own`, or one on the CPU."""
    fields: dict[str, Any] = {"host_id": "here", "backends": ALL if own else ANYWHERE, **more}
    about = control.DescribeEngineResponse(
        device_uuids=gpus(*own), worker_count=max(len(own), 1), device_type="cuda" if own else "cpu", **fields
    )
    return DescribedEngine(replica=cast(Any, _Replica(name, target)), about=about)


def _group(
    wanted: str,
    source: weight.GetManifestResponse,
    engines: tuple[DescribedEngine, ...],
    host: str = "10.0.0.1",
    interface: str = "",
) -> list[BackendGroup]:
    return group_by_backend(wanted, source, engines, host=host, interface=interface)


def groups(
    source: weight.GetManifestResponse, *engines: DescribedEngine, wanted: str = "auto"
) -> list[tuple[str, list[str]]]:
    return [(group.backend, [e.name for e in group.engines]) for group in _group(wanted, source, engines)]


def refusal(source: weight.GetManifestResponse, *engines: DescribedEngine, wanted: str = "auto") -> str:
    """Return the message about the one engine that is refused."""
    with pytest.raises(UpdateFailed) as failed:
        _group(wanted, source, engines)
    assert failed.value.trainer is None
    (error,) = failed.value.engines.values()
    assert error.reason == NO_BACKEND
    return error.message


def test_engines_on_the_ranks_gpus_read_their_memory() -> None:
    assert groups(trainer(1, 2), engine("a", 1), engine("b", 2), engine("c", 1, 2)) == [("cuda_ipc", ["a", "b", "c"])]


def test_gpus_with_peer_access_read_it_too_while_they_are_not_more_than_the_ranks() -> None:
    source = trainer(1, 2, reachable=(3, 4, 5))
    assert groups(source, engine("a", 3), engine("b", 4)) == [("cuda_ipc", ["a", "b"])]
    assert groups(source, engine("a", 3, 4), engine("b", 1)) == [("cuda_ipc", ["a", "b"])], "b reads its own GPU"
    assert groups(source, engine("a", 3), engine("b", 4), engine("c", 5)) == [("nccl", ["a", "b", "c"])]
    assert groups(source, engine("a", 3, 4, 5), engine("b", 1)) == [("cuda_ipc", ["b"]), ("nccl", ["a"])]


def test_gpus_without_peer_access_are_no_readers_of_it() -> None:
    source = trainer(1, reachable=(2,))
    assert groups(source, engine("a", 2), engine("far", 3)) == [("cuda_ipc", ["a"]), ("nccl", ["far"])]
    assert groups(source, engine("half", 2, 3)) == [("nccl", ["half"])], "every worker must reach every rank"


def test_an_engine_that_shares_a_gpu_never_gets_nccl() -> None:
    # Three workers read other GPUs' memory, more than the one rank; where NCCL cannot be, that is still the best.
    assert groups(trainer(1, reachable=(2, 3, 4)), engine("a", 1, 2, 3, 4)) == [("cuda_ipc", ["a"])]
    # One worker does not reach the rank, and another shares its GPU: main memory is left.
    assert groups(trainer(1), engine("a", 1, 2)) == [("shm", ["a"])]


def test_two_engines_on_one_gpu_are_not_in_one_nccl_group() -> None:
    assert groups(trainer(1), engine("a", 2), engine("b", 2)) == [("nccl", ["a"]), ("shm", ["b"])]


def test_engines_on_another_host_get_nccl_on_gpus_and_gloo_without() -> None:
    source = trainer(1, reachable=(2,))
    there = {"host_id": "there"}
    assert groups(source, engine("a", 2, **there), engine("b", **there)) == [("nccl", ["a"]), ("gloo", ["b"])]
    assert groups(source, engine("a", 1, **there)) == [("gloo", ["a"])], "whatever its UUID says"


def test_without_gpus_one_host_means_shared_memory() -> None:
    source = trainer()
    assert groups(source, engine("a"), engine("b", host_id="there")) == [("shm", ["a"]), ("gloo", ["b"])]
    assert groups(source, engine("a", 1)) == [("shm", ["a"])], "an engine on a GPU, a trainer on the CPU"
    assert groups(trainer(1), engine("a")) == [("shm", ["a"])]
    nowhere = trainer(host_id="")
    assert groups(nowhere, engine("a", host_id="")) == [("gloo", ["a"])], "hosts without a name are not equal"


def test_what_either_side_does_not_have_is_not_used() -> None:
    assert groups(trainer(1, backends=ANYWHERE), engine("a", 1)) == [("shm", ["a"])]
    assert groups(trainer(1, reachable=(2,)), engine("a", 2, backends=["nccl", "shm"])) == [("nccl", ["a"])]
    assert groups(trainer(1), engine("a", 2, backends=["gloo"])) == [("gloo", ["a"])]
    assert groups(trainer(backends=["gloo"]), engine("a")) == [("gloo", ["a"])]


def test_workers_have_places_within_their_group() -> None:
    a, b, c = engine("a", 1, 2), engine("b", host_id="there"), engine("c", 1)
    first, second = _group("auto", trainer(1, 2), (a, b, c))
    assert (first.receiver_count, first.first_receiver(a), first.first_receiver(c)) == (3, 0, 2)
    assert (second.receiver_count, second.first_receiver(b)) == (1, 0)


def test_a_backend_that_was_asked_for_is_used_alone() -> None:
    source = trainer(1, reachable=(2,))
    for backend in ("cuda_ipc", "nccl", "shm", "gloo"):
        assert groups(source, engine("a", 2), wanted=backend) == [(backend, ["a"])]


@pytest.mark.parametrize(
    ("wanted", "who", "why"),
    [
        ("nccl", engine("a", 1), f"its GPU {'01' * 16} holds a trainer rank, too: NCCL refuses two ranks on one GPU"),
        ("nccl", engine("a"), "the engine supports shm, gloo"),
        ("nccl", engine("a", backends=ALL), "the engine is not on GPUs"),
        (
            "cuda_ipc",
            engine("a", 3),
            f"its GPU {'03' * 16} cannot read the memory of the trainer's GPUs (no peer access",
        ),
        (
            "cuda_ipc",
            engine("a", 2, host_id="there"),
            "it is on another host than the trainer, or in another container",
        ),
        ("cuda_ipc", engine("a", backends=ALL), "the engine is not on GPUs"),
        ("shm", engine("a", host_id="there"), "it is on another host than the trainer, or in another container"),
        ("gloo", engine("a", backends=["shm"]), "the engine supports shm"),
        ("gloo", engine("a", backends=[]), "the engine supports no backend"),
    ],
)
def test_an_engine_that_cannot_have_it_is_refused_by_name(wanted: str, who: DescribedEngine, why: str) -> None:
    message = refusal(trainer(1, reachable=(2,)), engine("well", 2), who, wanted=wanted)
    assert message.startswith(f"a at x:1 cannot receive weights by {wanted}: {why}")
    assert message.endswith('; set weights.backend = "auto"')


def test_two_engines_on_one_gpu_are_refused_with_nccl_alone() -> None:
    message = refusal(trainer(1), engine("a", 2), engine("b", 2), wanted="nccl")
    assert f"b at x:1 cannot receive weights by nccl: its GPU {'02' * 16} holds a, too" in message


def test_an_engine_that_nothing_reaches_is_refused_with_every_reason() -> None:
    message = refusal(trainer(), engine("a", backends=["shm"], host_id="there"))
    assert message == (
        "no backend carries weights from the trainer to a at x:1 (cuda_ipc: the trainer does not support it; nccl: the "
        "trainer does not support it; shm: it is on another host than the trainer, or in another container; gloo: the "
        "engine supports shm)"
    )


def test_a_trainer_that_lacks_the_backend_is_to_blame_itself() -> None:
    with pytest.raises(UpdateFailed) as failed:
        _group("nccl", trainer(), (engine("a"),))
    assert failed.value.engines == {} and failed.value.trainer is not None
    assert "the trainer cannot send weights by nccl, only by shm, gloo; set weights.backend" in str(
        failed.value.trainer
    )


def test_gloo_is_refused_where_one_side_is_known_by_a_loopback_address_alone() -> None:
    there = engine("a", host_id="there", target="10.0.0.7:1")
    with pytest.raises(UpdateFailed) as failed:
        _group("auto", trainer(), (there,), host="127.0.0.1")
    (error,) = failed.value.engines.values()
    assert "gloo: the trainer is known by a loopback address, which 10.0.0.7 does not reach" in error.message
    assert "--advertise HOST" in error.message and error.reason == NO_BACKEND
    (group,) = _group("auto", trainer(), (there,), host="127.0.0.1", interface="eth1")
    assert group.backend == "gloo", "the recipe names a network"
    near = engine("b", host_id="there", target="127.0.0.1:2")  # another container with the same network
    (group,) = _group("auto", trainer(), (near,), host="127.0.0.1")
    assert group.backend == "gloo"


def test_engines_of_one_host_are_neighbours_in_a_chain() -> None:
    engines = [engine(name, host_id=host) for name, host in zip("abcde", ("y", "x", "here", "y", "x"), strict=True)]
    (group,) = _group("gloo", trainer(), tuple(engines))
    assert [member.name for member in group.engines] == ["c", "b", "e", "a", "d"]


def test_a_mixed_fleet_has_one_backend_for_each_kind_of_engine() -> None:
    source = trainer(1, 2, reachable=(3,))
    fleet = (
        engine("shares", 1), engine("beside", 3), engine("cpu"), engine("far", 7, host_id="there", target="10.0.0.2:1"),
        engine("far_cpu", host_id="there", target="10.0.0.2:2"),
    )  # fmt: skip
    assert groups(source, *fleet) == [
        ("cuda_ipc", ["shares", "beside"]), ("nccl", ["far"]), ("shm", ["cpu"]), ("gloo", ["far_cpu"]),
    ]  # fmt: skip


def test_nccl_is_not_chosen_for_a_host_that_a_loopback_address_hides() -> None:
    far = engine("far", 7, host_id="there", target="10.0.0.2:1")
    with pytest.raises(UpdateFailed) as failed:
        _group("auto", trainer(1), (far,), host="127.0.0.1")
    (error,) = failed.value.engines.values()
    assert "nccl: the trainer is known by a loopback address, which 10.0.0.2 does not reach" in error.message
    assert _group("auto", trainer(1), (far,), host="127.0.0.1", interface="eth0")[0].backend == "nccl"
