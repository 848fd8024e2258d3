"""RolloutControlService on a loopback server: weight updates and each status code, with a fake engine."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

from fourfold.errors import InvalidInput, StaleEpoch, Unavailable, WrongState
from fourfold.rollout.v1 import rollout_control_service_pb2 as control_pb
from tests.conftest import Serve
from tests.fakes.engine import DIGEST, VOCABULARY
from tests.fakes.rollout import OPEN, SHA256, Service, request, rollout_service


@pytest.fixture
async def service(serve: Serve) -> AsyncIterator[Service]:
    async with rollout_service(serve) as running:
        yield running


class TestControl:
    async def test_description(self, service: Service) -> None:
        answer = await service.control.describe(timeout=2)
        assert (answer.model_sha256, answer.host_id, list(answer.backends)) == (SHA256, "here", ["shm", "gloo"])
        assert (answer.worker_count, answer.device_type, answer.policy_version) == (1, "cpu", 0)
        assert answer.weight_state == control_pb.WEIGHT_STATE_CLEAN
        assert answer.engine_version

    async def test_an_update_from_begin_to_commit(self, service: Service) -> None:
        opened = await service.control.open(epoch=1, timeout=2, **OPEN)
        assert (opened.direct_tensor_count, opened.reload_tensor_count) == (0, 7)
        await service.control.begin(epoch=1, policy_version=2, pause_mode=control_pb.PAUSE_MODE_WAIT, timeout=2)
        assert (await service.control.describe(timeout=2)).weight_state == control_pb.WEIGHT_STATE_UPDATING
        assert await service.control.receive(epoch=1, policy_version=2, timeout=2) == DIGEST
        probe = await service.control.probe([5, 20, 30], timeout=2)
        assert np.isnan(probe[0])
        assert probe[1:].tolist() == [-2.0, -3.0]
        assert (await service.client.get_info(timeout=2)).policy_version == 0
        await service.control.commit(epoch=1, policy_version=2, timeout=2)
        assert (await service.client.get_info(timeout=2)).policy_version == 2

    async def test_calls_that_come_too_late_or_do_not_fit_have_their_own_errors(self, service: Service) -> None:
        await service.publish(5)
        with pytest.raises(StaleEpoch):
            await service.control.open(epoch=5, timeout=2, **OPEN)
        with pytest.raises(WrongState, match="versions never go back"):
            await service.control.begin(epoch=5, policy_version=5, pause_mode=control_pb.PAUSE_MODE_WAIT, timeout=2)
        service.engine.open_error = WrongState("the manifest has no tensor lm_head.weight")
        with pytest.raises(WrongState, match="lm_head"):
            await service.control.open(epoch=6, timeout=2, **OPEN)

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            ({"backend": "nccl"}, "this engine can use shm, gloo"),
            ({"manifest": b""}, "manifest has 0 bytes"),
            ({"manifest": bytes((8 << 20) + 1)}, "manifest has 8388609 bytes"),
            ({"offers": []}, "0 offers"),
            ({"offers": [bytes(4097)]}, "an offer has 4097 bytes"),
            ({"first_receiver_index": 1}, "do not fit into receiver_count 1"),
            ({"receiver_count": 0}, "receiver_count is 0; it must be at least 1"),
        ],
    )
    async def test_bad_open_is_an_invalid_argument(self, service: Service, change: dict[str, Any], words: str) -> None:
        with pytest.raises(InvalidInput, match=words):
            await service.control.open(epoch=1, timeout=2, **{**OPEN, **change})
        assert not service.engine.log

    @pytest.mark.parametrize("mode", [control_pb.PAUSE_MODE_UNSPECIFIED, 77])
    async def test_unknown_pause_mode_is_an_invalid_argument(self, service: Service, mode: Any) -> None:
        with pytest.raises(InvalidInput, match=r"pause_mode.*, PAUSE_MODE_KEEP, PAUSE_MODE_RECOMPUTE$"):
            await service.pause(mode=mode)

    @pytest.mark.parametrize("mode", [mode for mode in control_pb.PauseMode.values() if mode])
    @pytest.mark.parametrize("digest_is_right", [True, False])
    async def test_every_pause_mode_ends_with_new_weights_or_none(
        self, service: Service, mode: Any, digest_is_right: bool
    ) -> None:
        await service.pause(1, mode=mode)
        await service.control.receive(epoch=1, policy_version=1, timeout=2)
        if not digest_is_right:
            assert await service.control.abort(epoch=1, timeout=2) == control_pb.WEIGHT_STATE_DIRTY
            with pytest.raises(Unavailable, match="serves nothing"):
                await service.client.complete(request(), timeout=2)
            await service.pause(2, mode=mode)
            await service.control.receive(epoch=2, policy_version=2, timeout=2)
        version = 1 if digest_is_right else 2
        await service.control.commit(epoch=version, policy_version=version, timeout=2)
        info = await service.control.describe(timeout=2)
        assert (info.policy_version, info.weight_state) == (version, control_pb.WEIGHT_STATE_CLEAN)

    @pytest.mark.parametrize(
        ("ids", "words"),
        [
            ([1], "1 tokens; a probe of this engine must have 2 to 31"),
            ([1] * 32, "32 tokens"),
            ([1, VOCABULARY], "outside the vocabulary"),
        ],
    )
    async def test_bad_probe_is_an_invalid_argument(self, service: Service, ids: list[int], words: str) -> None:
        with pytest.raises(InvalidInput, match=words):
            await service.control.probe(ids, timeout=2)
