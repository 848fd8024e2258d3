"""`fourfold weights`: the table, and where it asks."""

from __future__ import annotations

from pathlib import Path

import pytest

from fourfold.coordinator.v1 import run_service_pb2 as pb
from fourfold.errors import ConfigError
from fourfold_coordinator.cli.weights import find_coordinator, table


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
