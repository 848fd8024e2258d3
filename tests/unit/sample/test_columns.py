"""Samples as columns: they give back each sample to the bit, and values for the columns that a sample does not have."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fourfold.arrays import EMPTY_FLOATS
from fourfold.sample.columns import Samples, SamplesBuilder
from fourfold.sample.wire import decode, encode
from tests.unit.sample import made
from tests.unit.sample.test_committed_bytes import same


def test_an_index_gives_the_sample_that_was_added() -> None:
    samples = Samples.of(made.every())
    assert len(samples) == 5 and same(samples, made.every())
    assert same([samples[-1], *samples[1:3]], [made.long(), made.full(), made.segments()[0]])
    assert Samples.of(samples) is samples
    with pytest.raises(IndexError):
        samples[5]


def test_columns_have_the_tokens_of_all_samples_one_after_another() -> None:
    samples = Samples.of(made.every())
    assert samples.lengths.tolist() == [7, 8, 7, 7, 300] and samples.starts[-1] == len(samples.tokens["token_ids"])
    assert samples.trajectories == [*("p0000003-0-0", "p0000003-0-1", "p0000003-0-2", "p0000003-0-2", "p0000003-0-3")]
    wanted = np.concatenate([sample.token_ids for sample in made.every()])
    assert np.array_equal(samples.tokens["token_ids"], wanted)
    with pytest.raises(ValueError, match="read-only"):
        samples.tokens["token_ids"][0] = 1


def test_a_sample_without_a_column_has_its_absent_values_among_others() -> None:
    samples = Samples.of([made.plain(), made.full(), made.plain()])
    assert samples.present["token_rewards"].tolist() == [False, True, False]
    assert samples.array("token_rewards", 0).tolist() == [0] * 7 == samples.array("token_rewards", 2).tolist()
    assert np.isnan(samples.array("reference_logprobs", 2)).all()
    assert np.array_equal(samples.array("token_rewards", 1), made.full().token_rewards)


def test_a_column_that_no_sample_has_takes_no_memory() -> None:
    bare = [replace(made.plain(), behavior_logprobs=EMPTY_FLOATS), made.plain()]
    assert len(Samples.of(bare[:1]).tokens["behavior_logprobs"]) == 0
    assert np.isnan(Samples.of(bare[:1]).array("behavior_logprobs", 0)).all()
    samples = Samples.of(bare)
    assert np.array_equal(samples.array("behavior_logprobs", 1), made.plain().behavior_logprobs, equal_nan=True)
    assert samples.array("token_rewards", 1).tolist() == [0] * 7


def test_values_are_replaced_for_all_samples() -> None:
    samples = Samples.of([made.plain(), made.full()])
    changed = samples.with_values(score=[None, 2.0], terms=[(), ()])
    assert [s.score for s in changed] == [None, 2.0] and [s.score for s in samples] == [0.5, 1.25]
    assert changed[1].terms == () and changed[1].scorer == "mixed@2"


def test_no_samples_are_columns_too() -> None:
    samples = SamplesBuilder().build()
    assert len(samples) == 0 and list(samples) == [] and samples.lengths.tolist() == []


def test_rows_of_a_teacher_pass_through_messages_and_columns() -> None:
    one, bare = made.plain(), made.full()
    ids = np.arange(21, dtype=np.int32).reshape(7, 3)
    taught = replace(one, teacher_ids=ids, teacher_logprobs=-ids.astype(np.float32))
    read = decode(encode(taught), vocabulary_size=made.VOCABULARY, max_tokens=made.MAX_TOKENS)
    assert np.array_equal(read.teacher_ids, ids) and np.array_equal(read.teacher_logprobs, -ids)
    samples = Samples.of([bare, read, bare])
    assert np.array_equal(samples[1].teacher_ids, ids) and np.array_equal(samples[1].teacher_logprobs, -ids)
    assert not len(samples[0].teacher_ids) and not len(samples.values["teacher_logprobs"][2])
