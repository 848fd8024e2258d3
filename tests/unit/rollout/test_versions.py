"""Splitting of outputs by the version that sampled them, and holding back of a version."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fourfold_rollout.engine import Finish, SampleOutput
from fourfold_rollout.generate.outputs import SampleVersions
from fourfold_rollout.pause.hold import TokenHold


def output(first: int, end: int, finish: Finish | None = None) -> SampleOutput:
    return SampleOutput(
        token_ids=np.arange(first, end, dtype=np.int32),
        logprobs=-np.arange(first, end, dtype=np.float32),
        finish=finish,
    )


def plain(pieces: list[tuple[int, SampleOutput]]) -> list[tuple[int, list[int], list[float], Finish | None]]:
    return [(version, o.token_ids.tolist(), o.logprobs.tolist(), o.finish) for version, o in pieces]


class TestCut:
    def test_a_final_output_over_three_versions(self) -> None:
        versions = SampleVersions()
        versions.end(2, 4)
        versions.end(2, 5)  # not a token of it
        versions.end(5, 6)
        assert plain(versions.cut(output(0, 7, Finish.STOP), 9)) == [
            (4, [0, 1], [0, -1], None),
            (6, [2, 3, 4], [-2, -3, -4], None),
            (9, [5, 6], [-5, -6], Finish.STOP),
        ]

    def test_an_update_that_was_given_up_cuts_nothing(self) -> None:
        versions = SampleVersions()
        versions.end(3, 1)
        whole = output(0, 5, Finish.STOP)
        assert plain(versions.cut(whole, 1)) == plain([(1, whole)])

    def test_a_finish_without_tokens_stays(self) -> None:
        versions = SampleVersions()
        versions.cut(output(0, 3), 1)
        versions.end(3, 1)
        assert plain(versions.cut(output(3, 3, Finish.ABORTED), 2)) == [(2, [], [], Finish.ABORTED)]

    def test_a_finish_whose_last_tokens_never_came_is_of_the_present_version(self) -> None:
        versions = SampleVersions()
        versions.end(4, 1)
        versions.cut(output(0, 2), 2)
        assert plain(versions.cut(output(2, 2, Finish.ABORTED), 2)) == [(2, [], [], Finish.ABORTED)]

    @given(
        steps=st.lists(st.sampled_from(["sample", "give", "update"]), max_size=60),
        finishes=st.booleans(),
    )
    def test_every_token_gets_the_version_that_sampled_it(self, steps: list[str], finishes: bool) -> None:
        versions, version, given_count = SampleVersions(), 0, 0
        truth: list[int] = []
        pieces: list[tuple[int, SampleOutput]] = []
        for step in [*steps, "give"]:
            if step == "sample":
                truth.append(version)
            elif step == "update":  # some tokens may still be inside the engine
                versions.end(len(truth), version)
                version += 1
            elif len(truth) > given_count:
                finish = Finish.LENGTH if finishes else None
                cut = versions.cut(output(given_count, len(truth), finish), version)
                assert [p.finish for _, p in cut] == [None] * (len(cut) - 1) + [finish]
                assert all(a != b for (a, _), (b, _) in itertools.pairwise(cut))
                assert all(len(piece.token_ids) for _, piece in cut)
                pieces += cut
                given_count = len(truth)
        assert [token for _, piece in pieces for token in piece.token_ids] == list(range(len(truth)))
        assert [v for v, piece in pieces for _ in piece.token_ids] == truth
        assert all((piece.logprobs == -piece.token_ids).all() for _, piece in pieces)


class Log:
    """A sink that records the outputs which the hold lets pass."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, int, str]] = []

    def deliver(self, index: int, version: int, output: SampleOutput) -> None:
        self.seen.append((index, version, ",".join(map(str, output.token_ids)) + "." * (output.finish is not None)))

    def drop(self, index: int, version: int) -> None:
        self.seen.append((index, version, "dropped"))


class TestTokenHold:
    def test_held_tokens_wait_and_older_ones_pass(self) -> None:
        token_hold, log = TokenHold(), Log()
        token_hold.version = 2
        token_hold.hold()
        token_hold.pass_on(log, 0, 2, output(0, 1))
        token_hold.pass_on(log, 1, 1, output(0, 2))
        token_hold.pass_on(log, 0, 2, output(1, 2, Finish.STOP))
        assert log.seen == [(1, 1, "0,1")]
        token_hold.release()
        assert log.seen == [(1, 1, "0,1"), (0, 2, "0"), (0, 2, "1.")]
        token_hold.pass_on(log, 2, 2, output(0, 1))
        assert log.seen[-1] == (2, 2, "0")
        assert not token_hold.holding

    def test_dropped_tokens_never_come_out(self) -> None:
        token_hold, log = TokenHold(), Log()
        token_hold.version = 2
        token_hold.hold()
        token_hold.pass_on(log, 0, 2, output(0, 1))
        token_hold.pass_on(log, 1, 2, output(0, 1, Finish.STOP))
        token_hold.drop()
        assert log.seen == [(1, 2, "dropped")]
        token_hold.pass_on(log, 0, 2, output(1, 2))
        token_hold.pass_on(log, 2, 1, output(0, 1))
        token_hold.pass_on(log, 0, 2, output(2, 2, Finish.ABORTED))
        token_hold.release()  # too late
        token_hold.pass_on(log, 4, 2, output(0, 1))
        token_hold.drop()  # again
        assert log.seen == [(1, 2, "dropped"), (2, 1, "0"), (0, 2, "dropped")]
        assert token_hold.holding
        token_hold.end_drop()
        token_hold.pass_on(log, 3, 2, output(0, 1))  # the same number again, after a new update
        assert log.seen[-1] == (3, 2, "0")

    def test_a_hold_after_a_drop_is_like_any_other(self) -> None:
        token_hold, log = TokenHold(), Log()
        token_hold.end_drop()  # without a drop: does nothing
        for _ in range(2):
            token_hold.hold()
            token_hold.drop()
            token_hold.end_drop()
            token_hold.hold()
            token_hold.end_drop()  # without a drop: the hold goes on
            token_hold.pass_on(log, 0, 0, output(0, 1))
            assert token_hold.holding and log.seen == []
            token_hold.release()
            assert log.seen == [(0, 0, "0")] and not token_hold.holding
            log.seen.clear()
        token_hold.release()  # without a hold: does nothing
        token_hold.drop()
        token_hold.pass_on(log, 0, 0, output(1, 2, Finish.STOP))
        assert log.seen == [(0, 0, "1.")]

    def test_outputs_of_a_forgotten_sink_are_discarded(self) -> None:
        token_hold, gone, log = TokenHold(), Log(), Log()
        token_hold.hold()
        for taker in (gone, log):
            token_hold.pass_on(taker, 0, 0, output(0, 1, Finish.STOP))
        token_hold.forget(gone)
        token_hold.release()
        assert (len(gone.seen), len(log.seen)) == (0, 1)
