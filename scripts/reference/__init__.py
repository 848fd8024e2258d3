"""The generated pages of docs/reference, by file name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

from scripts.reference.cli import cli_page
from scripts.reference.metrics import metrics_page
from scripts.reference.recipe import recipe_page
from scripts.reference.rpcs import rpcs_page

FOLDER: Final = Path(__file__).resolve().parents[2] / "docs/reference"
PAGES: Final[dict[str, Callable[[], str]]] = {
    "recipe.md": recipe_page,
    "metrics.md": metrics_page,
    "rpcs.md": rpcs_page,
    "cli.md": cli_page,
}
