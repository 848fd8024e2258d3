"""Tests which GPUs can read each other's memory, on simulated hosts."""

from __future__ import annotations

import sys
import uuid
from pathlib import Path
from typing import Any

import pytest

from fourfold.errors import NO_ADDRESS, WrongState
from fourfold.weights.transport import locality
from fourfold.weights.transport.locality import host_id, listen_address, reachable_gpus


def gpu(number: int) -> bytes:
    return uuid.UUID(int=number).bytes


class FakeNvml:
    """A host: its GPUs by number, pairs (reader, owner) without peer access, those in MIG mode, those kept from us."""

    NVML_P2P_CAPS_INDEX_READ = (0,)  # as nvidia-ml-py has it
    NVML_P2P_STATUS_OK = 0

    class NVMLError(Exception):
        pass

    def __init__(
        self,
        count: int,
        *,
        apart: set[tuple[int, int]] | None = None,
        sliced: set[int] | None = None,
        hidden: set[int] | None = None,
        driver: bool = True,
    ) -> None:
        self.count, self.apart, self.sliced, self.hidden = count, apart or set(), sliced or set(), hidden or set()
        self.driver = driver
        self.users = 0

    def nvmlInit(self) -> None:
        if not self.driver:
            raise self.NVMLError("Driver Not Loaded")
        self.users += 1

    def nvmlShutdown(self) -> None:
        self.users -= 1

    def nvmlDeviceGetCount(self) -> int:
        return self.count

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        if index in self.hidden:
            raise self.NVMLError("Insufficient Permissions")
        return index

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return f"GPU-{uuid.UUID(int=handle)}"

    def nvmlDeviceGetMigMode(self, handle: int) -> tuple[int, int]:
        if handle == 0 and handle not in self.sliced:
            raise self.NVMLError("Not Supported")
        return int(handle in self.sliced), 0

    def nvmlDeviceGetP2PStatus(self, reader: int, owner: int, index: int) -> int:
        assert reader != owner and index == 0
        return int((reader, owner) in self.apart)


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Any:
    def make(*args: Any, **kwargs: Any) -> FakeNvml:
        nvml = FakeNvml(*args, **kwargs)
        monkeypatch.setitem(sys.modules, "pynvml", nvml)
        return nvml

    return make


def test_peers_reach_each_other_and_every_gpu_itself(host: Any) -> None:
    nvml = host(4)
    assert reachable_gpus([gpu(1)]) == [gpu(0), gpu(1), gpu(2), gpu(3)]
    assert nvml.users == 0, "the library is closed again"


def test_a_gpu_must_reach_every_rank(host: Any) -> None:
    host(4, apart={(3, 0), (2, 1), (0, 2)})
    assert reachable_gpus([gpu(0)]) == [gpu(0), gpu(1), gpu(2)]
    assert reachable_gpus([gpu(0), gpu(1)]) == [gpu(0), gpu(1)], "3 does not reach 0, 2 does not reach 1"
    assert reachable_gpus([gpu(1), gpu(1)]) == [gpu(0), gpu(1), gpu(3)], "two ranks may share a GPU"


def test_a_gpu_in_slices_reaches_nothing_and_is_not_reached(host: Any) -> None:
    host(3, sliced={2})
    assert reachable_gpus([gpu(0)]) == [gpu(0), gpu(1)]
    assert reachable_gpus([gpu(0), gpu(2)]) == []


def test_gpus_that_we_may_not_look_at_are_left_out(host: Any) -> None:
    host(3, hidden={1})
    assert reachable_gpus([gpu(0)]) == [gpu(0), gpu(2)]


def test_a_rank_on_a_device_that_the_driver_does_not_name_is_not_reached(host: Any) -> None:
    host(2)
    assert reachable_gpus([gpu(9)]) == [], "such as a slice: its UUID is its own"


def test_without_gpus_nobody_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert reachable_gpus([]) == []


def test_without_library_or_driver_the_log_says_why(
    monkeypatch: pytest.MonkeyPatch, host: Any, caplog: pytest.LogCaptureFixture
) -> None:
    host(2, driver=False)
    assert reachable_gpus([gpu(0)]) == [] and "Driver Not Loaded" in caplog.text
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert reachable_gpus([gpu(0)]) == [] and "pip install nvidia-ml-py" in caplog.text


@pytest.mark.parametrize("differs", ["boot_id", "pid", "net", "ipc", "host", "user", "shared memory"])
def test_processes_of_different_hosts_and_containers_never_share_memory(
    differs: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    here = host_id()
    read = locality._read
    monkeypatch.setattr(locality, "_read", lambda path: "another" if path.name == differs else read(path))
    if differs == "host":
        monkeypatch.setattr("socket.gethostname", lambda: "another")
    if differs == "user":
        monkeypatch.setattr("os.getuid", lambda: -1)
    if differs == "shared memory":
        monkeypatch.setattr(locality, "_SHARED_MEMORY", tmp_path)
    assert len(host_id()) == 32 and host_id() != here


def test_a_host_without_the_id_of_its_boot_is_equal_to_none(monkeypatch: pytest.MonkeyPatch) -> None:
    read = locality._read
    monkeypatch.setattr(locality, "_read", lambda path: "" if path.name == "boot_id" else read(path))
    assert host_id() == "", "initial namespaces have the same numbers on every host"


def test_gloo_listens_where_the_service_is_known_or_on_the_named_interface() -> None:
    assert listen_address("127.0.0.1") == "127.0.0.1"
    assert listen_address("localhost") in ("127.0.0.1", "::1")
    assert listen_address("192.0.2.1", "lo") == "127.0.0.1"
    with pytest.raises(
        WrongState, match=r"none of its interfaces has 192\.0\.2\.1; start it with --advertise"
    ) as error:
        listen_address("192.0.2.1")  # an address of documentation, which no machine has
    assert error.value.reason == NO_ADDRESS
    with pytest.raises(WrongState, match=r"no such interface with an IP address; it has .*lo"):
        listen_address("127.0.0.1", "nothing7")
    with pytest.raises(WrongState, match=r"cannot receive weights on 'no-such-host\.invalid'"):
        listen_address("no-such-host.invalid")
    with pytest.raises(WrongState, match=r"none of its interfaces has 0\.0\.0\.0"):
        listen_address("0.0.0.0")
