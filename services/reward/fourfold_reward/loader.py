"""Finds a verifier by name, and loads its function.

A name is a built-in (`last_number`), `package.module:function` or `folder/file.py:function`. `find` runs in the service
and executes no user code; `load` runs in the worker.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import re
import sys
import types
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from fourfold.errors import ConfigError
from fourfold.host.scratch import Scratch
from fourfold.reward.function import RewardFunction
from fourfold_reward import __version__, openrlhf_modules, text_rules, verifiers
from fourfold_reward.signatures import Reads, adapt
from fourfold_reward.verifiers import GymOptions, did_you_mean

_MODULE: Final = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")


class VerifierError(Exception):
    """A name without a function, or a function that cannot be loaded. The text has value, rule and fix."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verifier:
    """Name, source and version of a reward function."""

    name: str  # as in the recipe
    file: str = ""  # absolute path, for `file.py:function`
    # Text of the file when the service started. Later workers run the same text, so a version means one function.
    source: str = ""
    module: str = ""  # for `package.module:function`
    function: str = ""  # name in the file or module; empty for a built-in verifier
    version: str = ""  # of the package, or start of the SHA-256 of the source, which for a module is known after `load`
    answer_fields: tuple[str, ...] = ("answer",)  # names of the reference answer for functions that read columns

    @property
    def builtin(self) -> bool:
        """Return true for a verifier of this package."""
        return not self.function


def find(name: str, *, directory: Path) -> Verifier:
    """Return the verifier of a name without running its code. Relative file paths start from `directory`.

    Raises VerifierError: unknown built-in, unreadable file, or malformed name.
    """
    if verifiers.is_builtin(name):
        return Verifier(name=name, version=__version__)
    place, colon, function = name.rpartition(":")
    known = [builtin for builtin, _ in verifiers.DESCRIPTIONS]
    usage = f"Known: {', '.join(known)}; or give package.module:function, or path/file.py:function."
    if not colon or not place or not function.isidentifier():
        raise VerifierError(f"{name!r} is not a verifier{did_you_mean(name, known) or '.'} {usage}")
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
        raise VerifierError(f"{name!r}: {place!r} is neither a module nor a .py file. {usage}")
    return Verifier(name=name, module=place, function=function)


def check(name: str, *, directory: Path) -> None:
    """Check that a name has a function, for a command that writes a recipe. The function's code is not run.

    Raises ConfigError: `find` fails, or the file does not have the word.
    """
    try:
        found = find(name, directory=directory)
    except VerifierError as error:
        raise ConfigError(str(error)) from None
    if found.file and not re.search(rf"\b{found.function}\b", found.source):
        raise ConfigError(f"{name}: {found.file} has no {found.function}; name a function of that file")


def load(verifier: Verifier, options: GymOptions) -> tuple[RewardFunction, Verifier, Reads]:
    """Import a function; return it, the verifier with its version, and the function's inputs besides the texts.

    User code runs and may raise any exception.

    Raises:
        VerifierError: the function is missing, has none of the known signatures, or its module changed since the
            service started.
    """
    if verifier.builtin:
        try:
            reads = Reads(tokens=verifier.name == text_rules.LENGTH)
            return verifiers.load(verifier.name, options), verifier, reads
        except (LookupError, ImportError) as error:
            raise VerifierError(f"{verifier.name!r}: {error.args[0]}") from None
    module = run_file(verifier) if verifier.file else importlib.import_module(verifier.module)
    function = getattr(module, verifier.function, None)
    if function is None:
        hint = did_you_mean(verifier.function, [n for n, v in vars(module).items() if callable(v) and n[0] != "_"])
        raise VerifierError(f"{verifier.name!r}: no {verifier.function!r} there{hint}")
    if not callable(function):
        raise VerifierError(f"{verifier.name!r} is {function!r:.100}; it must be a function; name one of that file")
    try:
        adapted, reads = adapt(function, answer_fields=verifier.answer_fields)
    except TypeError as error:
        raise VerifierError(f"{verifier.name!r}: {error}") from None
    return adapted, verifier if verifier.file else _with_version(verifier, module), reads


def run_file(verifier: Verifier) -> types.ModuleType:
    """Run the text of a file as a module; it may raise any exception."""
    path = Path(verifier.file)
    if openrlhf_modules.PACKAGE in verifier.source:
        openrlhf_modules.provide()
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))  # the file can import its neighbours, which hide no installed package
    module = types.ModuleType(f"reward_file_{verifier.version}")
    module.__file__ = verifier.file
    sys.modules[module.__name__] = module  # dataclasses and type hints look up their module
    # Processes that the file spawns, as a process pool does, import the module by its name.
    start = f"__file__ = {verifier.file!r}\nexec(compile({verifier.source!r}, __file__, 'exec'))\n"
    if openrlhf_modules.PACKAGE in verifier.source:
        start = f"from fourfold_reward import openrlhf_modules\nopenrlhf_modules.provide()\n{start}"
    with contextlib.suppress(OSError):  # no room on the disk; only files that start processes need it
        copy = Scratch("reward-file").path / f"{module.__name__}.py"
        copy.write_text(start, encoding="utf-8")
        sys.path.append(str(copy.parent))
    exec(compile(verifier.source, verifier.file, "exec"), module.__dict__)
    return module


def _with_version(verifier: Verifier, module: types.ModuleType) -> Verifier:
    file = getattr(module, "__file__", None)
    version = _digest(Path(file).read_bytes()) if file else "builtin"
    if verifier.version and verifier.version != version:
        raise VerifierError(
            f"{verifier.name!r}: {file} changed from {verifier.version} to {version} while the service ran; "
            "restart the service to use the new text"
        )
    return replace(verifier, version=version)


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:12]
