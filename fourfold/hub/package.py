"""Imports `huggingface_hub` when it is used, and names the errors of its HTTP client."""

from __future__ import annotations

import sys
from typing import Any, Final

from fourfold.errors import ConfigError
from fourfold.install import install_command

MALFORMED: Final = (ValueError, TypeError, KeyError, AttributeError)
"""Exceptions of huggingface_hub for answers of other servers, such as a proxy's login page, which it does not check."""


def hub_package() -> Any:
    """Return the package `huggingface_hub`; raise ConfigError if it is not installed."""
    try:
        import huggingface_hub.constants
        import huggingface_hub.errors
    except ModuleNotFoundError:
        raise ConfigError(f"the hub needs the package huggingface_hub; {install_command('fourfold[hub]')}") from None
    return huggingface_hub


def network_errors() -> tuple[type[Exception], ...]:
    """Return OSError, and the errors of the HTTP client that this version of huggingface_hub uses, which are none."""
    return (OSError, *(sys.modules[name].HTTPError for name in ("httpx2", "httpx") if name in sys.modules))
