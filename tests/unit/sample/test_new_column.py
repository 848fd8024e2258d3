"""A new token column needs three files of fourfold/sample and its messages to pass from an engine to the trainer.

The process of this test has a copy of fourfold/sample with one more column, whose value is a row of two numbers. All
other modules are those of the tree.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

import fourfold

PROGRAM: Final = Path(__file__).with_name("new_column_program.py")
ROW: Final = '    TokenColumn(name="routes", number=100, dtype=np.dtype(("<u2", (2,))), required=False, absent=9),\n)'
FIELD: Final = "    routes: object = field(default_factory=lambda: np.empty(0))\n"
EDITS: Final = (  # file, text, what replaces it
    ("token_columns.py", "\n    LOSS_MASK,\n)", f"\n    LOSS_MASK,\n{ROW}"),
    ("token_columns.py", "dtype=_FLAG, required=False),\n)", f"dtype=_FLAG, required=False),\n{ROW}"),
    ("sample.py", '    trajectory_id: str = ""', f'{FIELD}    trajectory_id: str = ""'),
    ("sampled.py", "    constrained: BoolArray =", f"{FIELD}    constrained: BoolArray ="),
)


def test_a_new_column_passes_from_the_engine_to_the_trainer_unchanged(tmp_path: Path) -> None:
    copy = tmp_path / "sample"
    shutil.copytree(Path(fourfold.__path__[0], "sample"), copy, ignore=shutil.ignore_patterns("__pycache__"))
    for name, old, new in EDITS:
        text = (copy / name).read_text()
        assert text.count(old) == 1, (name, old)
        (copy / name).write_text(text.replace(old, new))
    command = [sys.executable, str(PROGRAM), str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
