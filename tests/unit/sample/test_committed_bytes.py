"""The bytes on the wire and on the disk stay those of `data/`, which peers and old run folders have."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Final

import numpy as np

from fourfold.arrays import Sample
from fourfold.rpc.codec import decode, encode_parts, encode_stream
from fourfold.trainer.v1.trainer_service_pb2 import TrainStepRequest
from fourfold_coordinator.data.prompts import Prompt, own_prompt
from fourfold_coordinator.state import experiences
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
    return [
        Trajectory(prompt=prompt, sample=made.plain(), completion='say "2"\n\t\u2028'),
        Trajectory(prompt=prompt, sample=made.full(), completion="", abstained=True, dropped="ABSTAINED"),
        Trajectory(
            prompt=own, sample=first, more_segments=(second,), completion="x", by_agent=True, metrics={"tools": 2.5}
        ),
        Trajectory(prompt=prompt, sample=made.long(), completion="..."),
    ]


def test_a_train_step_has_the_committed_bytes() -> None:
    wanted = (DATA / "train_step.bin").read_bytes()
    (found,) = encode_stream(TrainStepRequest(step=7), 2, map(encode_parts, made.every()))
    assert found == wanted
    assert same([decode(m, **LIMITS) for m in TrainStepRequest.FromString(wanted).experiences], made.every())


def test_a_segment_file_has_the_committed_bytes(tmp_path: Path) -> None:
    files = SegmentFiles(tmp_path)
    files.append([experiences._to_record(t) for t in trajectories()])
    assert next(tmp_path.iterdir()).read_bytes() == (DATA / "00000001.segment").read_bytes()


def test_the_lines_of_a_step_have_the_committed_bytes() -> None:
    assert to_lines(7, trajectories()) == (DATA / "samples.jsonl").read_bytes()
    wanted = (DATA / "tokens.jsonl").read_bytes()
    assert _plain(bytes(to_token_lines(7, trajectories()))) == _plain(wanted)


def _plain(lines: bytes) -> list[tuple[int, str, bytes]]:
    """Return the lines with their tokens as they were before zlib, whose versions compress differently."""
    found = map(parse_token_line, lines.splitlines())
    return [(line.step, line.sample_id, zlib.decompress(base64.b64decode(line.tokens))) for line in found]
