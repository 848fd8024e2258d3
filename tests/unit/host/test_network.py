"""The network interface of an address."""

from __future__ import annotations

import socket
from types import SimpleNamespace

import psutil
import pytest

from fourfold.host.network import NCCL_VARIABLE, nccl_interface


@pytest.fixture(autouse=True)
def _interfaces(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {"lo": ["127.0.0.1", "::1"], "eth1": ["10.0.0.1", "fe80::1%eth1"]}
    found = {name: [SimpleNamespace(address=address) for address in each] for name, each in known.items()}
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: found)
    monkeypatch.delenv(NCCL_VARIABLE, raising=False)


@pytest.mark.parametrize(
    ("variable", "host", "named", "found"),
    [  # without "=" NCCL would take a name for the beginning of one
        ("", "127.0.0.1", "", "=lo"),
        ("", "localhost", "", "=lo"),
        ("", "::1", "", "=lo"),
        ("", "10.0.0.1", "", "=eth1"),
        ("", "10.0.0.1", "ib0", "=ib0"),
        ("ib0", "127.0.0.1", "", "ib0"),
        ("ib0", "10.0.0.1", "eth1", "ib0"),
    ],
)
def test_nccl_uses_the_interface_of_the_user_or_else_of_the_address(
    variable: str, host: str, named: str, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(NCCL_VARIABLE, variable)
    assert nccl_interface(host, named) == found


def test_an_address_of_no_interface_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert nccl_interface("10.0.0.2") == "=lo"

    def unknown(*_args: object, **_keys: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    assert nccl_interface("engine.example") == "=lo"
    first, second = (record.getMessage() for record in caplog.records)
    assert "NCCL uses loopback alone; for weights between machines set NCCL_SOCKET_IFNAME" in first
    assert first.endswith("no network interface of this machine has the address 10.0.0.2; it has eth1, lo")
    assert "the host name 'engine.example' is unknown here" in second
