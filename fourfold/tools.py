"""Finds the parts of the distribution `fourfold-tools` that other distributions call. They do not import it.

It registers these entry points in the group `fourfold.tools`:

    gguf-reader    module: `python -m MODULE FILE.gguf FOLDER` converts a GGUF file into a model folder
    gguf-writer    function that writes a model folder as a GGUF file
    step-time      class that predicts step times for `fourfold plan` (`fourfold.plan.speed.SpeedPredictor`)
"""

from __future__ import annotations

import importlib.metadata
from importlib.metadata import EntryPoint

from fourfold.errors import ConfigError
from fourfold.install import install_command


def find_tool(name: str, purpose: str) -> EntryPoint:
    """Return the entry point of a tool.

    Raises:
        ConfigError: `fourfold-tools` is not installed; the message begins with `purpose`, which needs it.
    """
    for entry in importlib.metadata.entry_points(group="fourfold.tools", name=name):
        return entry
    raise ConfigError(f"{purpose} needs fourfold-tools, which is not installed; {install_command('fourfold-tools')}")
