"""The file of reference log-probabilities: a sample is there as a whole, or not at all."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fourfold.arrays import Float32Array
from fourfold.config.sources import DataSourceConfig
from fourfold.errors import ConfigError
from fourfold.model.tokenizer import Tokenizer
from fourfold.sample import Sample
from fourfold_coordinator.rows.encode import EncodingSettings
from fourfold_coordinator.rows.normal import Form
from fourfold_coordinator.rows.reference_file import ReferenceFile
from fourfold_coordinator.rows.row_source import RowBatch, RowSource
from fourfold_coordinator.rows.store import TokenStore, prepare_store
from fourfold_coordinator.state.files import DiskFull, DiskWriter
from fourfold_coordinator.state.run_board import RunBoard
from tests.support.chat_templates import write_tokenizer
from tests.support.template_shapes import SHAPES


@pytest.fixture
def labelled(tmp_path: Path) -> TokenStore:
    """Seven labelled answers, with prompts and answers of different lengths."""
    write_tokenizer(tmp_path, SHAPES["qwen25"], {"eos_token": "<|im_end|>"})
    path = tmp_path / "rows.jsonl"
    rows = [
        {"prompt": "why " * (1 + 5 * (i % 2)), "completion": "so " * i + "it is", "label": i % 3 > 0} for i in range(7)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = EncodingSettings(form=Form.LABELLED, max_tokens=200)
    return prepare_store(DataSourceConfig(path=str(path)), settings, Tokenizer.load(tmp_path), tmp_path / "tokens")


def source(store: TokenStore, **options: float) -> RowSource:
    return RowSource([store], rows_per_step=3, seed=1, mismatched_tokens=200, **options)  # type: ignore[arg-type]


def take(rows: RowSource, steps: int) -> list[RowBatch]:
    found = [rows.take(step) for step in range(1, steps + 1)]
    return [batch for batch in found if batch is not None]


def known(sample: Sample) -> Float32Array:
    """Return log-probabilities that follow from the tokens: equal for equal samples alone."""
    values = (-np.cumsum(sample.token_ids) / 1000).astype(np.float32)
    values[0] = np.nan
    values[1 : int(np.argmax(sample.action_mask))] = 0
    return values


def test_later_passes_find_what_was_computed_for_the_first(tmp_path: Path, labelled: TokenStore) -> None:
    file = ReferenceFile(tmp_path / "reference.bin")
    batches = take(source(labelled, passes=3), 9)
    assert [(batch.units, len(batch.samples)) for batch in batches[:3]] == [(3, 6), (3, 6), (1, 4)]
    assert source(labelled, passes=3).steps_of_first_pass == 3
    for batch in batches[:3]:
        assert not file.has(batch)
        file.write(batch, [known(sample) for sample in batch.samples])
    for batch in batches:
        assert file.has(batch)
        for slot, sample in zip(batch.slots, batch.samples, strict=True):
            np.testing.assert_array_equal(file.read(slot, sample), known(sample))
    assert len({slot for batch in batches[:2] for slot in batch.slots}) == 12, "each sample has a place of its own"


def test_the_last_row_of_a_pass_gets_the_joined_answers_of_the_step_before(labelled: TokenStore) -> None:
    _, before, last = take(source(labelled, passes=1), 3)
    joined = [sample for sample in last.samples if sample.score is None]
    assert [s.token_ids.tobytes() for s in joined] == [s.token_ids.tobytes() for s in before.samples if s.score is None]
    assert last.slots[1:] == before.slots[3:] and {sample.group_id for sample in last.samples} == {"s0000003-6"}


@pytest.mark.parametrize("cut", ["half", "other"])
def test_a_damaged_sample_is_not_there(tmp_path: Path, labelled: TokenStore, cut: str) -> None:
    file = ReferenceFile(tmp_path / "reference.bin")
    (batch,) = take(source(labelled), 1)
    file.write(batch, [known(sample) for sample in batch.samples])
    data = bytearray(file.path.read_bytes())
    place = max(batch.slots[:3]) * 4 + 6
    file.path.write_bytes(data[:place] if cut == "half" else data[:place] + b"\x01" + data[place + 1 :])
    assert not file.has(batch)
    found = [file.read(slot, sample) is None for slot, sample in zip(batch.slots[:3], batch.samples[:3], strict=True)]
    assert found.count(True) == 1
    file.write(batch, [known(sample) for sample in batch.samples])
    assert file.has(batch)
    shifted = replace(batch.samples[0], token_ids=batch.samples[0].token_ids + 1)
    assert file.read(batch.slots[0], shifted) is None, "it was computed for other tokens"


async def test_a_full_disk_is_named_that_is_not_the_one_of_the_run(tmp_path: Path, labelled: TokenStore) -> None:
    (batch,) = take(source(labelled), 1)
    disk = DiskWriter(tmp_path, RunBoard(name="toy", step_count=1), wait_seconds=0)
    with pytest.raises(DiskFull, match=r"^/dev cannot be written \(.*/dev/full"):
        await disk.write(ReferenceFile(Path("/dev/full")).write, batch, [known(sample) for sample in batch.samples])


def test_a_folder_without_a_right_to_write_is_an_error_with_the_key(tmp_path: Path, labelled: TokenStore) -> None:
    class Refusing(type(tmp_path)):  # type: ignore[misc]
        def __fspath__(self) -> str:
            raise PermissionError(13, "Permission denied")

    (batch,) = take(source(labelled), 1)
    with pytest.raises(ConfigError, match=r"cannot write the reference .*Permission denied.*set data.cache"):
        ReferenceFile(Refusing(tmp_path / "x")).write(batch, [])
