"""Tests the status of a weight update: which process waits for which, which tensors differ, and its table."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from fourfold.coordinator.v1 import run_service_pb2 as pb
from fourfold.coordinator.v1.membership_service_pb2 import Role
from fourfold.errors import ConfigError
from fourfold.weights.digest import differing_tensors, join_names
from fourfold_coordinator.cli.weights import find_coordinator, table
from fourfold_coordinator.routing.registry import Member
from fourfold_coordinator.weights import status
from fourfold_coordinator.weights.status import WeightPlaneStatus

MANIFEST = b'{"tensors":[["a","float32",[1]],["b","float32",[2]],["c","bfloat16",[3]]]}'
ENGINES = ["rollout-0", "rollout-1"]


class _Replica:
    def __init__(self, name: str, role: Role.ValueType = Role.ROLE_ROLLOUT) -> None:
        self.member = Member(member_id=name, incarnation="1", role=role, target="x:1", tokenizer_sha256=b"")
        self.version, self.unusable_reason = 4, ""


class Scene:
    """A plane with a clock of its own, a trainer and two engines."""

    def __init__(self) -> None:
        self.now = 0.0
        self.plane = WeightPlaneStatus(lambda: self.now)
        self.plane.policy_version = 5
        self.replicas = [_Replica("trainer-0", Role.ROLE_TRAINER), *(_Replica(name) for name in ENGINES)]

    def begin(self, phase: str, busy: list[str] | None = None) -> None:
        self.plane.begin_phase(
            phase, trainer="trainer-0", engines=ENGINES, busy=[*ENGINES, "trainer-0"] if busy is None else busy
        )

    def report(self) -> pb.GetWeightPlaneResponse:
        return self.plane.to_proto(cast(Any, reversed(self.replicas)))

    def waits(self) -> dict[str, list[str]]:
        return {party.member_id: list(party.waits_for) for party in self.report().parties}


def test_between_updates_nobody_waits() -> None:
    scene = Scene()
    for name in ENGINES:
        scene.plane.set_state(name, status.SERVING)
    scene.now = 3.0
    report = scene.report()
    assert (report.phase, report.phase_seconds, report.policy_version) == ("", 0.0, 5)
    assert [p.member_id for p in report.parties] == ["trainer-0", *ENGINES], "the trainer first"
    assert [(p.state, p.state_seconds) for p in report.parties[1:]] == [("serving", 3.0)] * 2
    assert scene.waits() == {"trainer-0": [], "rollout-0": [], "rollout-1": []}
    assert scene.plane.describe() == ""


def test_in_a_pause_those_who_stopped_wait_for_the_others() -> None:
    scene = Scene()
    scene.begin(status.PAUSE)
    assert scene.waits() == {"trainer-0": ENGINES, "rollout-0": [], "rollout-1": []}
    scene.plane.mark_done("rollout-0")
    scene.now = 2.4
    assert scene.waits() == {"trainer-0": ["rollout-1"], "rollout-0": ["rollout-1"], "rollout-1": []}
    assert [p.state for p in scene.report().parties] == ["updating", "waiting", "updating"]
    assert scene.plane.describe() == "weights of version 5: pause for 2 s (rollout-1, trainer-0)"


def test_in_a_transfer_engines_wait_for_the_trainer_and_it_for_them() -> None:
    scene = Scene()
    scene.begin(status.TRANSFER)
    assert scene.waits() == {"trainer-0": ENGINES, "rollout-0": ["trainer-0"], "rollout-1": ["trainer-0"]}
    scene.plane.mark_done("rollout-1")
    assert scene.waits() == {
        "trainer-0": ["rollout-0"],
        "rollout-0": ["trainer-0"],
        "rollout-1": ["rollout-0", "trainer-0"],
    }
    scene.plane.mark_done("trainer-0")
    assert scene.waits() == {"trainer-0": ["rollout-0"], "rollout-0": [], "rollout-1": ["rollout-0"]}


def test_commits_wait_for_the_trainers_probe_and_for_no_engine() -> None:
    scene = Scene()
    scene.begin(status.COMMIT)
    assert scene.waits() == {"trainer-0": [], "rollout-0": ["trainer-0"], "rollout-1": ["trainer-0"]}
    scene.plane.mark_done("trainer-0")
    assert scene.waits() == {"trainer-0": [], "rollout-0": [], "rollout-1": []}
    scene.plane.end_update()
    assert scene.report().phase == ""


def test_an_error_stays_until_the_engine_serves_again() -> None:
    scene = Scene()
    scene.plane.set_backend("rollout-0", "nccl")
    scene.plane.set_state("rollout-0", status.FENCED, "its probe differs")
    scene.now = 1.0
    scene.plane.set_state("rollout-0", status.UPDATING)
    party = scene.report().parties[1]
    assert (party.state, party.last_error, party.backend) == ("updating", "its probe differs", "nccl")
    scene.plane.set_state("rollout-0", status.SERVING)
    assert scene.report().parties[1].last_error == ""
    scene.replicas[1].unusable_reason = "not looked at yet"
    assert scene.report().parties[1].state == "waiting", "a new process of that name"


def test_tensors_whose_sums_differ_are_named_in_their_order() -> None:
    left = bytes(16) + bytes([1]) * 16 + bytes([2]) * 16
    assert differing_tensors(MANIFEST, left, left) == []
    assert differing_tensors(MANIFEST, left, bytes(48)) == ["b", "c"]
    assert differing_tensors(MANIFEST, left, b"") == [], "left out on one side"
    assert join_names(["a"]) == "a"
    assert join_names(["a", "b", "c", "d", "e"]) == "a, b, c and 2 more"


def test_a_thousand_engines_are_reported_without_a_million_names() -> None:
    names = [f"rollout-{index:04d}" for index in range(1000)]
    plane = WeightPlaneStatus(lambda: 0.0)
    plane.begin_phase(status.PAUSE, trainer="trainer-0", engines=names)
    plane.mark_done("rollout-0000")
    assert plane.waits_for("rollout-0000") == names[1:17]
    assert plane.waits_for("rollout-0001") == []
    assert plane.waits_for("trainer-0") == names[1:17]
    plane.mark_done("rollout-0001")
    assert plane.waits_for("rollout-0000") == names[2:18]
    assert plane.describe().endswith("rollout-0017, 983 more)")


def test_the_table_says_who_waits_for_whom() -> None:
    plane = pb.GetWeightPlaneResponse(
        policy_version=12,
        epoch=7,
        phase="transfer",
        phase_seconds=3.21,
        last_update_seconds=0.84,
        last_pause_seconds=0.312,
        parties=[
            pb.WeightParty(
                member_id="trainer-0", policy_version=12, state="updating", state_seconds=3.2, waits_for=["rollout-10"]
            ),
            pb.WeightParty(
                member_id="rollout-10",
                backend="nccl",
                policy_version=-1,
                state="fenced",
                state_seconds=61.25,
                last_error="it died in the middle",
            ),
        ],
    )
    assert table(plane) == [
        "version 12, epoch 7: transfer for 3.2 s",
        "last update: 0.84 s, of which engines were paused for 0.31 s",
        "",
        "member      state      since  version  backend  waits for   last error",
        "trainer-0   updating   3.2 s       12  -        rollout-10",
        "rollout-10  fenced    61.2 s        -  nccl     -           it died in the middle",
    ]


def test_before_the_first_update_there_is_little_to_say() -> None:
    lines = table(pb.GetWeightPlaneResponse(policy_version=0, epoch=3))
    assert lines[:2] == ["version 0, epoch 3: no update in progress", ""]


def test_it_asks_the_coordinator_of_a_folder_or_at_an_address(tmp_path: Path) -> None:
    assert find_coordinator("here:5000", None) == ("here:5000", "")
    with pytest.raises(ConfigError, match="no run was started here"):
        find_coordinator(str(tmp_path), None)
    with pytest.raises(ConfigError, match="neither a folder of runs/ nor HOST:PORT"):
        find_coordinator("runs/nothing", None)
