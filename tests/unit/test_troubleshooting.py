"""Every message that docs/troubleshooting.md quotes is still in the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/troubleshooting.md"
FOLDERS = ("fourfold", "services")
# Texts of other programs, in tables whose other texts are Fourfold's.
FOREIGN = {"gpu_memory_utilization"}


def _quoted() -> list[str]:
    cells = [line.split("|")[1] for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    texts = [text for cell in cells for text in re.findall("`([^`]+)`", cell)]
    return [text for text in texts if text not in FOREIGN and not text.endswith(".json") and not text.endswith("/")]


@pytest.fixture(scope="module")
def code() -> str:
    """Return all code, with the parts of texts that are split over lines put together."""
    paths = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py") if "_pb2" not in path.name]
    text = "\n".join(path.read_text() for path in paths if "build" not in path.relative_to(ROOT).parts)
    return re.sub(r"""(["'])\n\s*f?\1""", "", text)


@pytest.mark.parametrize("message", _quoted())
def test_a_quoted_message_is_in_the_code(message: str, code: str) -> None:
    parts = [re.escape(part) for part in message.split("...") if part.strip()]
    value = r"[^\n]{0,400}?"  # in the code, a value is an expression in braces
    assert re.search(value.join(parts), code), f"no code writes {message!r}: correct the page"


def test_the_page_quotes_messages() -> None:
    assert len(_quoted()) > 55
