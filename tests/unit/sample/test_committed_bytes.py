"""The bytes on the wire and on the disk stay those of `data/`, which peers and old run folders have."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Final

import numpy as np
import pytest

from fourfold.rpc.codec import encode_stream
from fourfold.sample import Sample
from fourfold.sample.record import AgentTask, DamagedRecord, TrajectoryRecord, decode_record, encode_record
from fourfold.sample.wire import decode, encode_parts
from fourfold.trainer.v1.trainer_service_pb2 import TrainStepRequest
from fourfold_coordinator.data.prompts import Prompt, own_prompt
from fourfold_coordinator.state.sample_tokens import parse_token_line, to_token_lines
from fourfold_coordinator.state.samples import Trajectory, to_lines
from fourfold_coordinator.state.segments import SegmentFiles
from tests.unit.sample import made

DATA: Final = Path(__file__).parent / "data"
LIMITS: Final = {"vocabulary_size": made.VOCABULARY, "max_tokens": made.MAX_TOKENS}


def facts(sample: Sample) -> list[object]:
    """Return the values of all fields, to the bit."""
    values = (getattr(sample, field.name) for field in fields(Sample))
    return [(v.dtype.str, v.tobytes()) if isinstance(v, np.ndarray) else v for v in values]


def same(found: Sequence[Sample], wanted: Sequence[Sample]) -> bool:
    return [facts(sample) for sample in found] == [facts(sample) for sample in wanted]


def trajectories() -> list[Trajectory]:
    prompt = Prompt(
        index=3,
        text="1 + 1 =\n",
        token_ids=np.arange(3, dtype=np.int32),
        answer="2",
        metadata_json="{}",
        group_key="3",
        source="sums",
    )
    first, second = made.segments()
    own = own_prompt("Find \u00fc", answer="u", metadata_json='{"level": 2}')
    task = AgentTask(text=own.text, answer=own.answer, metadata_json=own.metadata_json)
    return [
        Trajectory(prompt=prompt, segments=(made.plain(),), completion='say "2"\n\t\u2028'),
        Trajectory(prompt=prompt, segments=(made.full(),), completion="", abstained=True, dropped="ABSTAINED"),
        Trajectory(
            prompt=own,
            segments=(first, second),
            completion="x",
            task=task,
            metrics={"tools": 2.5},
        ),
        Trajectory(prompt=prompt, segments=(made.long(),), completion="..."),
    ]


def records() -> list[TrajectoryRecord]:
    task = AgentTask(text="Find \u00fc", answer="u", metadata_json='{"level": 2}')
    return [
        TrajectoryRecord(segments=(made.plain(),)),
        TrajectoryRecord(segments=(made.full(),), abstained=True),
        TrajectoryRecord(segments=made.segments(), task=task, metrics={"tools": 2.5}),
        TrajectoryRecord(segments=(made.long(),)),
    ]


def test_a_train_step_has_the_committed_bytes() -> None:
    wanted = (DATA / "train_step.bin").read_bytes()
    (found,) = encode_stream(TrainStepRequest(step=7), 2, map(encode_parts, made.every()))
    assert found == wanted
    assert same([decode(m, **LIMITS) for m in TrainStepRequest.FromString(wanted).experiences], made.every())


def test_a_train_step_of_rows_has_the_committed_bytes() -> None:
    wanted = (DATA / "train_step_rows.bin").read_bytes()
    (found,) = encode_stream(TrainStepRequest(step=7), 2, [encode_parts(made.row())])
    assert found == wanted
    assert same([decode(m, **LIMITS) for m in TrainStepRequest.FromString(wanted).experiences], [made.row()])


def test_a_segment_file_has_the_committed_bytes(tmp_path: Path) -> None:
    files = SegmentFiles(tmp_path)
    places = files.append([encode_record(record) for record in records()])
    assert next(tmp_path.iterdir()).read_bytes() == (DATA / "00000001.segment").read_bytes()
    for record, place in zip(records(), places, strict=True):
        first = record.segments[0]
        found = decode_record(files.read(*place), sample_id=first.sample_id, group_id=first.group_id, **LIMITS)
        assert same(found.segments, record.segments)
        assert (found.abstained, found.task, found.metrics) == (record.abstained, record.task, record.metrics)


def test_a_damaged_record_is_refused() -> None:
    plain, _, agent, _ = (b"".join(encode_record(record)) for record in records())
    for body, name, fault in (
        (plain[:-3], "p0000003-0-0", "Error parsing message"),
        (agent[:3], "p0000003-0-2", "unpack_from requires a buffer"),
        (plain, "p0000003-0-1", "it is of sample 'p0000003-0-0'"),
    ):
        with pytest.raises(DamagedRecord, match=fault):
            decode_record(body, sample_id=name, group_id="p0000003-0", **LIMITS)


def test_the_lines_of_a_step_have_the_committed_bytes() -> None:
    assert to_lines(7, trajectories()) == (DATA / "samples.jsonl").read_bytes()
    wanted = (DATA / "tokens.jsonl").read_bytes()
    assert _plain(bytes(to_token_lines(7, trajectories()))) == _plain(wanted)


def _plain(lines: bytes) -> list[tuple[int, str, bytes]]:
    """Return the lines with their tokens as they were before zlib, whose versions compress differently."""
    found = map(parse_token_line, lines.splitlines())
    return [(line.step, line.sample_id, zlib.decompress(base64.b64decode(line.tokens))) for line in found]
