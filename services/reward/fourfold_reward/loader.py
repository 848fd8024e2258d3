"""Finds a verifier by its name, and loads it.

Three kinds of name: a built-in (`last_number`), `package.module:function`, and
`folder/file.py:function`. `find` runs in the service and executes nothing of the user's;
`load` runs in the worker. A file is read once, when the service starts: a worker that starts
later runs the same text, whatever happened to the file, so that a version means one function.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib
import inspect
import re
import sys
import types
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final, Self

from fourfold_reward import __version__, verifiers
from fourfold_reward.sample import RewardFunction
from fourfold_reward.verifiers import GymOptions

_MODULE: Final = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")
_DIGEST_CHARACTERS: Final = 12


class VerifierError(Exception):
    """A name that leads to no function, or a function that cannot be loaded: value, rule, fix."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verifier:
    """Where a reward function is."""

    name: str
    """As configured or asked for."""
    file: str = ""
    """Absolute path of the file of a `file.py:function`."""
    source: str = ""
    """Text of that file."""
    module: str = ""
    """Module of a `package.module:function`."""
    function: str = ""
    """Name in the file or module; empty for a built-in."""
    version: str = ""
    """Version of the package, or start of the SHA-256 of the source; of a module only known once it is loaded."""

    @property
    def builtin(self) -> bool:
        """Whether it is one of ours, and no function of the operator."""
        return not self.function

    def with_version(self, version: str) -> Self:
        """Return the same verifier, its version known."""
        return replace(self, version=version)

    def to_json(self) -> dict[str, str]:
        """Return the form that crosses the pipe."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, str]) -> Self:
        """Read what `to_json` returned."""
        return cls(**data)


def find(name: str, *, directory: Path) -> Verifier:
    """Return the verifier of this name, without running any code of it.

    Args:
        name: one of the three kinds.
        directory: what a relative file path starts from.

    Raises:
        VerifierError: no such built-in, no such file, or not one of the three kinds.
    """
    if verifiers.is_builtin(name):
        return Verifier(name=name, version=__version__)
    place, colon, function = name.rpartition(":")
    if not colon or not place or not function.isidentifier():
        raise VerifierError(f"{name!r} is no verifier{_suggest(name)} {_known()}")
    if place.endswith(".py") or "/" in place:
        path = (directory / place).resolve()
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
            raise VerifierError(
                f"{name!r}: cannot read {path} ({reason}); a relative path starts from {directory}"
            ) from None
        return Verifier(name=name, file=str(path), source=text, function=function, version=_digest(text.encode()))
    if not _MODULE.fullmatch(place):
        raise VerifierError(f"{name!r}: {place!r} is neither a module nor a .py file. {_known()}")
    return Verifier(name=name, module=place, function=function)


def load(verifier: Verifier, options: GymOptions) -> tuple[RewardFunction, Verifier]:
    """Import the function; return it, and the verifier with its version. Runs user code: anything may be raised.

    Raises:
        VerifierError: the function is missing, cannot be called with one sample, or its module is not
            the one that the service started with.
    """
    if verifier.builtin:
        try:
            return verifiers.load(verifier.name, options), verifier
        except (LookupError, ImportError) as error:
            raise VerifierError(f"{verifier.name!r}: {error.args[0]}") from None
    module = _run_file(verifier) if verifier.file else importlib.import_module(verifier.module)
    function = getattr(module, verifier.function, None)
    if function is None:
        names = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
        close = difflib.get_close_matches(verifier.function, names, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise VerifierError(f"{verifier.name!r}: no {verifier.function!r} there{hint}")
    _check_callable(function, verifier.name)
    return function, _with_version(verifier, module)


def _run_file(verifier: Verifier) -> types.ModuleType:
    path = Path(verifier.file)
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))  # its neighbours can be imported, and shadow nothing
    module = types.ModuleType(f"reward_file_{verifier.version}")
    module.__file__ = verifier.file
    sys.modules[module.__name__] = module  # dataclasses and type hints look their module up
    exec(compile(verifier.source, verifier.file, "exec"), module.__dict__)
    return module


def _check_callable(function: Any, name: str) -> None:
    if not callable(function):
        raise VerifierError(f"{name!r} is {function!r:.100}; it must be a function of one argument, the sample")
    try:
        signature = inspect.signature(function)
    except (ValueError, TypeError):
        return  # written in C and silent about it
    try:
        signature.bind(object())
    except TypeError:
        raise VerifierError(f"{name!r} has the parameters {signature}; it is called with one, the sample") from None


def _with_version(verifier: Verifier, module: types.ModuleType) -> Verifier:
    if verifier.file:
        return verifier
    file = getattr(module, "__file__", None)
    version = _digest(Path(file).read_bytes()) if file else "builtin"
    if verifier.version and verifier.version != version:
        raise VerifierError(
            f"{verifier.name!r}: {file} changed from {verifier.version} to {version} while the service ran; "
            "restart the service to use the new text"
        )
    return verifier.with_version(version)


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:_DIGEST_CHARACTERS]


def _names() -> list[str]:
    return [name for name, _ in verifiers.describe()]


def _suggest(name: str) -> str:
    close = difflib.get_close_matches(name, _names(), n=1)
    return f"; did you mean {close[0]!r}?" if close else "."


def _known() -> str:
    return f"Known: {', '.join(_names())}; or give package.module:function, or path/file.py:function."
