"""The clients check lengths, order, counts and outcomes of every response before they return it."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest

from fourfold import errors
from fourfold.reference.client import AsyncReferenceClient
from fourfold.reward.client import AsyncRewardClient
from fourfold.reward.v1 import reward_service_pb2 as reward
from fourfold.rollout.client import AsyncRolloutClient
from fourfold.rollout.v1 import rollout_service_pb2 as rollout
from fourfold.rpc.codec import pack_floats
from fourfold.sample.wire import encode
from fourfold.trainer.client import AsyncTrainerClient
from fourfold.trainer.v1 import trainer_service_pb2 as pb
from tests.conftest import Serve
from tests.fakes.servicers import Reference, Reward, Rollout, Trainer, generated, sample, score_item


def likely(logprob: float) -> rollout.SampleChunk:
    chunk = generated(0, 1, done=True)
    chunk.logprobs = pack_floats([logprob])
    return chunk


class TestRolloutClient:
    """`complete` joins chunks, and checks each of them."""

    async def complete(self, serve: Serve, *chunks: rollout.SampleChunk, count: int = 1) -> Any:
        client = AsyncRolloutClient(await serve(Rollout(*chunks).servicer()), peer="rollout-0")
        params = rollout.SamplingParams(max_tokens=8)
        request = rollout.GenerateRequest(request_id="q", sample_count=count, sampling_params=params)
        return await client.complete(request, timeout=5)

    async def test_chunks_of_all_samples_are_joined_in_order(self, serve: Serve) -> None:
        first, second = await self.complete(
            serve,
            generated(1, 5, 6, version=2),
            generated(0, 1, 2, 3, version=2, done=True),
            generated(1, 7, version=2),
            generated(1, 8, version=3),
            generated(1, version=3, done=True),
            count=2,
        )
        assert first.token_ids.tolist() == [1, 2, 3]
        assert first.token_ids.dtype == np.int32
        assert second.token_ids.tolist() == [5, 6, 7, 8]
        assert second.logprobs.tolist() == [-0.5] * 4
        assert second.logprobs.dtype == np.float32
        assert [(s.policy_version, s.token_count) for s in second.version_spans] == [(2, 3), (3, 1)]
        assert second.finish_reason == rollout.FINISH_REASON_STOP

    async def test_a_sample_may_be_empty(self, serve: Serve) -> None:
        (only,) = await self.complete(serve, generated(0, done=True))
        assert len(only.token_ids) == len(only.logprobs) == 0
        assert only.version_spans == ()

    async def test_answers_that_do_not_add_up_are_refused(self, serve: Serve) -> None:
        odd = generated(0, 1, done=True)
        odd.token_ids += b"\0"
        short = generated(0, 1, 2, done=True)
        short.logprobs = short.logprobs[:4]
        many = generated(0, *range(1, 10), done=True)
        for message, kind, chunks in [
            ("sample 1 was not requested; there are 1", "WRONG_SAMPLE", [generated(1, 1, done=True)]),
            ("has 5 bytes", "WRONG_LENGTH", [odd]),
            ("8 bytes of token_ids and 4 of logprobs", "WRONG_LENGTH", [short]),
            ("ended before sample 0", "UNFINISHED", [generated(0, 1)]),
            ("continues after", "WRONG_SAMPLE", [generated(0, 1, done=True), generated(0, 2)]),
            ("policy_version -1; 0 or", "BAD_VERSION", [generated(0, 1, version=-1, done=True)]),
            ("policy_version 3; 4 or", "BAD_VERSION", [generated(0, 1, version=4), generated(0, 1, version=3)]),
            ("policy_version 9223372036854775807", "BAD_VERSION", [generated(0, 1, version=2**63 - 1)]),
            ("more tokens than the 8", "TOO_MANY_TOKENS", [many]),
            ("more tokens than the 8", "TOO_MANY_TOKENS", [generated(0, 1)] * 9),
            ("neither tokens nor", "BAD_RESPONSE", [generated(0)]),
            *[("NaN, -inf or above 0", "NOT_FINITE", [likely(value)]) for value in (np.nan, -np.inf, np.inf, 0.5)],
        ]:
            with pytest.raises(errors.PeerFault, match=message) as fault:
                await self.complete(serve, *chunks)
            assert (fault.value.reason, fault.value.peer) == (kind, "rollout-0")

    async def test_tokens_of_a_version_before_the_wanted_one_are_refused(self, serve: Serve) -> None:
        client = AsyncRolloutClient(
            await serve(Rollout(generated(0, 1, version=4, done=True)).servicer()), peer="rollout-0"
        )
        with pytest.raises(errors.PeerFault, match="policy_version 4; 5 or a later one is due"):
            await client.complete(rollout.GenerateRequest(request_id="q", min_policy_version=5), timeout=5)

    async def test_a_stream_of_empty_responses_is_ended(self, serve: Serve) -> None:
        class Empty(Rollout):
            async def Generate(self, request: rollout.GenerateRequest, context: Any) -> Any:
                while True:
                    yield rollout.GenerateResponse()

        client = AsyncRolloutClient(await serve(Empty().servicer()), peer="rollout-0")
        with pytest.raises(errors.PeerFault, match="rollout-0: Generate of q: a response has no chunks"):
            await client.complete(rollout.GenerateRequest(request_id="q"), timeout=5)


class TestRewardClient:
    """Third parties implement this service, so that each response is checked."""

    async def test_large_requests_travel_in_parts(self, serve: Serve) -> None:
        servicer = Reward()
        client = AsyncRewardClient(await serve(servicer.servicer()), peer="r")
        items = [score_item(f"s{i}", "x" * (1 << 20)) for i in range(9)]
        assert [s.sample_id for s in await client.score(items, timeout=10)] == [f"s{i}" for i in range(9)]
        assert [len(c.items) for c in servicer.calls] == [3, 3, 3]
        servicer.calls.clear()
        await client.score(items[:5], timeout=10, max_sample_count=2)
        assert [len(c.items) for c in servicer.calls] == [2, 2, 1]

    @pytest.mark.parametrize(
        ("ids", "kind"),
        [
            ("", "WRONG_COUNT"),
            ("a", "WRONG_COUNT"),
            ("abc", "WRONG_COUNT"),
            ("ba", "WRONG_ORDER"),
            ("ax", "WRONG_IDS"),
            ("aa", "WRONG_IDS"),
        ],
    )
    async def test_scores_of_other_samples_or_in_another_order_are_refused(
        self, serve: Serve, ids: str, kind: str
    ) -> None:
        answer = reward.ScoreResponse(scores=[reward.SampleScore(sample_id=i, score=1) for i in ids])
        client = AsyncRewardClient(await serve(Reward(answer=answer).servicer()), peer="r")
        with pytest.raises(errors.PeerFault, match=r"r: Score: .* in the order of the request") as fault:
            await client.score([score_item("a"), score_item("b")], timeout=5)
        assert fault.value.reason == kind

    @pytest.mark.parametrize(
        ("score", "reason"),
        [
            (reward.SampleScore(), "NO_OUTCOME"),
            (reward.SampleScore(score=float("nan")), "NOT_FINITE"),
            (reward.SampleScore(score=float("inf")), "NOT_FINITE"),
            (reward.SampleScore(score=1, components={"a": float("nan")}), "NOT_FINITE"),
            (reward.SampleScore(score=1, components={f"c{i}": 1.0 for i in range(65)}), "BAD_COMPONENTS"),
            (reward.SampleScore(score=1, components={"\x1b[2J": 1.0}), "BAD_COMPONENTS"),
            (reward.SampleScore(score=1, components={"": 1.0}), "BAD_COMPONENTS"),
            (reward.SampleScore(abstain_reason=""), "BAD_REASON"),
            (reward.SampleScore(abstain_reason="no idea"), "BAD_REASON"),
            (reward.SampleScore(error=reward.SampleError(code=0, reason="RAISED")), "BAD_CODE"),
            (reward.SampleScore(error=reward.SampleError(code=99, reason="RAISED")), "BAD_CODE"),
            (reward.SampleScore(error=reward.SampleError(code=13, reason="x" * 64)), "BAD_REASON"),
        ],
    )
    async def test_an_outcome_that_breaks_the_contract_is_an_error_of_its_sample(
        self, serve: Serve, score: reward.SampleScore, reason: str
    ) -> None:
        score.sample_id = "a"
        good = reward.SampleScore(sample_id="b", score=0.0, components={"format": 1.0})
        answer = reward.ScoreResponse(scores=[score, good])
        client = AsyncRewardClient(await serve(Reward(answer=answer).servicer()), peer="r")
        bad, kept = await client.score([score_item("a"), score_item("b")], timeout=5)
        assert bad.error.reason == reason and "broke the contract: it " in bad.error.message
        assert kept == good and not bad.components

    async def test_texts_are_made_safe_and_short(self, serve: Serve) -> None:
        error = reward.SampleError(code=2, reason="RAISED", message="\x1b[31mred\x1b[0m\nline " + "x" * 5000)
        scores = [reward.SampleScore(sample_id="a", error=error)]
        client = AsyncRewardClient(await serve(Reward(answer=reward.ScoreResponse(scores=scores)).servicer()), peer="r")
        (score,) = await client.score([score_item("a")], timeout=5)
        assert score.error.message.startswith("red line xxx") and len(score.error.message) == 1000


class TestTrainerClient:
    """A batch is sent in chunks, and each failure is a named error."""

    async def test_a_batch_travels_in_chunks_with_its_step(self, serve: Serve) -> None:
        servicer = Trainer()
        client = AsyncTrainerClient(await serve(servicer.servicer()), peer="t")
        experiences = (encode(sample(f"s{i}", 20_000)) for i in range(30))  # 30 * 180 kB
        response = await client.train_step(4, experiences, timeout=10)
        assert response.metrics["train/samples_per_step"] == 30
        assert {m.step for m in servicer.messages} == {4}
        assert 4 < len(servicer.messages) < 10
        assert [m.begin for m in servicer.messages[-2:]] == [False, True] and servicer.messages[0].HasField("begin")
        assert max(m.ByteSize() for m in servicer.messages) < 1.3 * (1 << 20)

    async def test_an_empty_batch_still_reaches_the_trainer(self, serve: Serve) -> None:
        response = await AsyncTrainerClient(await serve(Trainer().servicer()), peer="t").train_step(4, [], timeout=5)
        assert response.step == 4

    async def test_a_trainer_that_refuses_before_it_has_read_everything_is_heard(self, serve: Serve) -> None:
        servicer = Trainer(raises=errors.WrongState("the next step is 7"))
        client = AsyncTrainerClient(await serve(servicer.servicer()), peer="trainer-0")
        experiences = (encode(sample(f"s{i}", 20_000)) for i in range(500))
        with pytest.raises(errors.WrongState, match="trainer-0, TrainStep: the next step is 7"):
            await client.train_step(4, experiences, timeout=10)

    async def test_a_server_that_knows_no_trainer_is_an_error_of_ours_whenever_it_answers(self, serve: Serve) -> None:
        client = AsyncTrainerClient(await serve(Reward().servicer()), peer="trainer-0")
        for _ in range(10):  # before the first chunk, between two, or in the middle of one
            experiences = (encode(sample(f"s{i}", 20_000)) for i in range(100))
            with pytest.raises(errors.FourfoldError, match=r"trainer-0, TrainStep: (Method not found|the connection)"):
                await client.train_step(1, experiences, timeout=10)

    async def test_a_status_that_came_between_two_chunks_is_the_error(
        self, serve: Serve, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        channel = await serve(Trainer(raises=errors.WrongState("the next step is 7")).servicer())
        client = AsyncTrainerClient(channel, peer="t")
        write = importlib.import_module("grpc.aio._call").StreamUnaryCall.write

        async def late(call: Any, message: Any) -> None:
            await write(call, message)
            await call.done_writing()
            await call.code()  # the status is here before the next chunk is written

        monkeypatch.setattr("grpc.aio._call.StreamUnaryCall.write", late)
        with pytest.raises(errors.WrongState, match="the next step is 7"):
            await client.train_step(1, [encode(sample(f"s{i}", 200_000)) for i in range(2)], timeout=10)

    async def test_an_error_while_the_batch_is_made_is_that_error(self, serve: Serve) -> None:
        def experiences() -> Any:
            yield encode(sample("a"))
            raise errors.NotFound("row is gone")

        client = AsyncTrainerClient(await serve(Trainer().servicer()), peer="t")
        with pytest.raises(errors.NotFound, match="row is gone"):
            await client.train_step(4, experiences(), timeout=5)

    async def test_a_score_that_is_missing_or_not_finite_is_refused(self, serve: Serve) -> None:
        class Scorer(Trainer):
            values: Any = ()

            async def ComputeLogprobs(self, request: pb.ComputeLogprobsRequest, context: Any) -> Any:
                assert request.include_values
                return pb.ComputeLogprobsResponse(values=[pack_floats(row) for row in self.values])

        servicer = Scorer()
        client = AsyncTrainerClient(await serve(servicer.servicer()), peer="t")
        samples = [sample("a"), sample("b")]
        servicer.values = [[0.5], [-2]]
        assert await client.compute_scores(samples, timeout=5) == [0.5, -2.0]
        for values, kind in [
            ([[1]], "WRONG_COUNT"),
            ([[1], [1, 2]], "WRONG_COUNT"),
            ([[1], []], "WRONG_COUNT"),
            ([[1], [np.nan]], "NOT_FINITE"),
            ([[1], [np.inf]], "NOT_FINITE"),
        ]:
            servicer.values = values
            with pytest.raises(errors.PeerFault) as fault:
                await client.compute_scores(samples, timeout=5)
            assert fault.value.reason == kind


class TestReferenceClient:
    """Rows come back in order and are checked."""

    async def test_rows_come_back_in_order_over_several_calls(self, serve: Serve) -> None:
        servicer = Reference()
        client = AsyncReferenceClient(await serve(servicer.servicer()), peer="ref")
        samples = [sample(f"s{i}", 50_000 + i) for i in range(50)]  # 10 MB of ids
        rows = await client.compute_logprobs(samples, timeout=10)
        assert [len(r) for r in rows] == [50_000 + i for i in range(50)]
        assert np.isnan(rows[0][0])
        assert rows[0][1:4].tolist() == [-1, -2, -3]
        assert servicer.calls == 3

    async def test_rows_that_do_not_fit_are_refused(self, serve: Serve) -> None:
        nan = pack_floats(np.full(4, np.nan, np.float32))
        for message, broken in {
            "answered 1 rows of logprobs for 2": lambda rows: rows[:1],
            "have 12 bytes": lambda rows: [rows[0][:12], rows[1]],
            "sample b are not finite": lambda rows: [rows[0], nan],
        }.items():
            client = AsyncReferenceClient(await serve(Reference(broken).servicer()), peer="ref")
            with pytest.raises(errors.PeerFault, match=message):
                await client.compute_logprobs([sample("a"), sample("b")], timeout=5)
