"""A seeded run at lag 0 has the token ids, log-probabilities, losses and weights of the committed record."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.lock.seeded_run import STEPS, differences, machine, read, recorded, run, write_inputs

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.lock, pytest.mark.timeout(300)]


def test_a_run_has_the_values_of_the_record(tmp_path: Path) -> None:
    write_inputs(tmp_path)
    wrong = differences(read(run(tmp_path, STEPS), machine()), recorded())
    assert not wrong, "\n".join(wrong[:30])
