"""The parts of fourfold-tools that other distributions find."""

from __future__ import annotations

import importlib.metadata
import re

import pytest

from fourfold.errors import ConfigError
from fourfold.install import find_tool, install_command


def test_a_tool_is_found_without_an_import() -> None:
    assert find_tool("gguf-reader", "a conversion").module == "fourfold_tools.gguf.convert_gguf"


def test_without_the_distribution_its_installation_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda **_: ())
    text = f"a conversion needs fourfold-tools, which is not installed; {install_command('fourfold-tools')}"
    with pytest.raises(ConfigError, match=re.escape(text)):
        find_tool("gguf-reader", "a conversion")
