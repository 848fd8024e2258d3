"""Addresses that a proxy of the environment must not get, and those that it must."""

from __future__ import annotations

import os
import urllib.request

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from fourfold.errors import ConfigError
from fourfold.host import proxies
from fourfold.rpc.channel import open_channel
from fourfold.rpc.server import Server

_NAMES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")
_NOBODY = "http://127.0.0.1:9"


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in _NAMES:
        for case in (name, name.upper()):
            monkeypatch.setenv(case, "")  # so that what `bypass` sets is undone
            monkeypatch.delenv(case)


@pytest.mark.parametrize(
    "names", [("http_proxy",), ("https_proxy", "NO_PROXY"), ("grpc_proxy",), ("http_proxy", "no_proxy")]
)
async def test_a_channel_uses_no_proxy(names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in names:
        monkeypatch.setenv(name, "example.com" if name.lower() == "no_proxy" else _NOBODY)
    server = Server(listen="127.0.0.1:0", security=None)
    channel = open_channel(await server.start(), None)
    try:
        request = health_pb2.HealthCheckRequest()
        answer = await health_pb2_grpc.HealthStub(channel).Check(request, timeout=5)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
    except grpc.aio.AioRpcError as error:
        pytest.fail(str(error.details()))
    finally:
        await channel.close()
        await server.stop(0)


def test_libraries_reach_this_machine_without_the_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    proxies.bypass(*proxies.THIS_MACHINE)
    assert "no_proxy" not in os.environ, "without a proxy nothing changes"
    monkeypatch.setenv("HTTPS_PROXY", _NOBODY)
    monkeypatch.setenv("NO_PROXY", "corp.example, 10.0.0.0/8")
    proxies.bypass(*proxies.THIS_MACHINE)
    proxies.bypass("127.0.0.1", "gateway-0")
    assert (
        os.environ["no_proxy"] == os.environ["NO_PROXY"] == "corp.example,10.0.0.0/8,localhost,127.0.0.1,::1,gateway-0"
    )
    assert urllib.request.proxy_bypass("127.0.0.1") and urllib.request.proxy_bypass("a.corp.example")
    assert not urllib.request.proxy_bypass("huggingface.co")


@pytest.mark.parametrize(
    ("lower", "upper", "both"),
    [
        ("*", "a.example", "*"),
        ("*,a.example", "", "*,a.example,judge"),
        ("a.example", "b.example, a.example", "a.example,b.example,judge"),
    ],
)
def test_no_host_that_needed_no_proxy_is_forgotten(
    lower: str, upper: str, both: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("http_proxy", _NOBODY), ("no_proxy", lower), ("NO_PROXY", upper)):
        monkeypatch.setenv(name, value)
    proxies.bypass("judge")
    assert os.environ["no_proxy"] == os.environ["NO_PROXY"] == both


_PRIVATE = (
    "127.0.0.1 [::1] localhost 10.1.2.3 192.168.0.4 [fd00::2] judge j.svc.cluster.local j.svc a.localhost. N.Internal"
)
_PUBLIC = "8.8.8.8 api.example.com local.example.com [2606:4700::1111]"


@pytest.mark.parametrize(
    ("host", "private"),
    [*((host, True) for host in _PRIVATE.split()), *((host, False) for host in _PUBLIC.split())],
)
def test_private_addresses_need_no_proxy(host: str, private: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for url in (f"http://{host}:8000/x", f"wss://{host}/ws"):
        assert proxies.proxy_for(url) is None
    monkeypatch.setenv("http_proxy", _NOBODY)
    monkeypatch.setenv("all_proxy", "http://127.0.0.1:10")
    assert proxies.proxy_for(f"http://{host}:8000/x") == (None if private else _NOBODY)
    assert proxies.proxy_for(f"ws://{host}/ws") == (None if private else _NOBODY)
    assert proxies.proxy_for(f"https://{host}/x") == (None if private else "http://127.0.0.1:10")
    monkeypatch.setenv("no_proxy", host.strip("[]"))
    assert proxies.proxy_for(f"http://{host}:8000/x") is None


@pytest.mark.parametrize(
    ("proxy", "used"),
    [("proxy.corp:3128", "http://proxy.corp:3128"), ("me:key@proxy:1", "http://me:key@proxy:1"),
     ("HTTPS://proxy:1", "HTTPS://proxy:1"), ("socks5h://me:key@proxy:1080", "socks5h://...: only HTTP proxies")],
)  # fmt: skip
def test_a_proxy_without_a_scheme_is_one_of_http_and_others_are_refused(
    proxy: str, used: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ALL_PROXY", proxy)
    if "socks" not in proxy:
        assert proxies.proxy_for("https://me@api.example.com:8443/x") == used
    else:
        with pytest.raises(ConfigError) as caught:
            proxies.proxy_for("https://me@api.example.com:8443/x")
        assert used in caught.value.message and "key" not in caught.value.message
    monkeypatch.setenv("no_proxy", "api.example.com:8443")
    assert proxies.proxy_for("https://me@api.example.com:8443/x") is None
