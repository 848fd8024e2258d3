"""Tests imports without garbage collections."""

from __future__ import annotations

import gc
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fourfold.host.imports import fast_imports


@pytest.fixture(autouse=True)
def collections() -> Iterator[None]:
    yield
    gc.unfreeze()
    gc.enable()


def test_nothing_is_collected_meanwhile_and_what_was_made_is_left_out_of_later_collections() -> None:
    frozen = gc.get_freeze_count()
    with fast_imports():
        assert not gc.isenabled()
        kept = [[number] for number in range(100_000)]
    assert gc.isenabled() and gc.get_freeze_count() > frozen + 100_000
    assert len(kept) == 100_000


def test_a_failed_import_leaves_collections_on() -> None:
    with pytest.raises(ImportError), fast_imports():
        raise ImportError
    assert gc.isenabled()


def test_collections_that_were_off_stay_off() -> None:
    gc.disable()
    with fast_imports():
        pass
    assert not gc.isenabled()


def test_an_optional_dependency_is_hidden_in_the_block_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "optional_dependency_of_a_test"
    (tmp_path / f"{name}.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    with fast_imports(without=name), pytest.raises(ImportError):
        importlib.import_module(name)
    with fast_imports(without="gc"):
        assert importlib.import_module("gc") is gc
    importlib.import_module(name)
    del sys.modules[name]
