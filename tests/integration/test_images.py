"""The images of deploy/Dockerfile, built on a Debian that mmdebstrap makes, and their containers, started by podman."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support import tiny_run

ROOT = Path(__file__).parents[2]
MISSING = [name for name in ("podman", "mmdebstrap", "runc") if shutil.which(name) is None]
PIP_VARIABLES = ("PIP_NO_INDEX", "PIP_FIND_LINKS", "PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_CERT")
# Containers may not raise limits above those of this process, which podman would do.
LIMITS = f"--ulimit=nofile=1024:{min(4096, resource.getrlimit(resource.RLIMIT_NOFILE)[1])}", "--ulimit=nproc=4096:4096"
PORTS = {"coordinator": 50050, "rollout": 50051, "trainer": 50052, "reward": 50053, "reference": 50054}
TABLES = """
[rollout]
replicas = 0
max_concurrent_samples = 16

[trainer]
replicas = 0
ranks = 1

[security]
directory = "certs"
"""

pytestmark = [
    pytest.mark.integration,
    pytest.mark.slow,
    pytest.mark.soak,  # to build two small images takes seven minutes; CI checks deploy/ with tests/unit/test_deploy.py
    pytest.mark.skipif(os.geteuid() != 0 or bool(MISSING), reason=f"needs root, and podman and mmdebstrap: {MISSING}"),
]


@dataclass(frozen=True)
class Podman:
    """podman with images and containers of its own in `folder`."""

    folder: Path

    def __call__(self, *words: str, timeout: float = 60, check: bool = True) -> str:
        """Return what `podman WORDS` prints; raise AssertionError with its errors if it fails and `check` is true."""
        places = ["--root", f"{self.folder}/store", "--runroot", f"{self.folder}/run"]
        # runc starts containers under every layout of control groups; crun refuses mixed ones.
        line = ["podman", *places, "--storage-driver", "overlay", "--runtime", "runc", *words]
        done = subprocess.run(line, capture_output=True, text=True, check=False, timeout=timeout)
        assert done.returncode == 0 or not check, f"{' '.join(line)}: {done.returncode}\n{done.stdout}{done.stderr}"[
            -6000:
        ]
        return done.stdout

    def build(self, target: str, timeout: float) -> None:
        """Build an image for CPUs, with packages from where pip finds them here."""
        options = []
        for name in PIP_VARIABLES:
            if value := os.environ.get(name):
                options += ["--build-arg", f"{name}={value}"]
                options += [f"--volume={path}:{path}:ro" for path in value.split() if Path(path).exists()]
        options += ["--build-arg=BASE=localhost/debian", "--build-arg=DEVICE=cpu", "--target", target, "--tag", target]
        # Without layers, podman stores a stage once, and not after each step. chroot needs no control groups.
        isolation = ["--layers=false", "--isolation=chroot", "--network=host", "--format=docker"]
        self("build", *isolation, *options, "--file", str(ROOT / "deploy/Dockerfile"), str(ROOT), timeout=timeout)

    def start(self, role: str, volume: Path, network: str, *words: str) -> None:
        """Start the container ROLE from the image of that name."""
        place = ["--hostname=coordinator"] if role == "coordinator" else ["--env=FOURFOLD_ADVERTISE=coordinator"]
        options = [
            "--detach",
            "--name",
            role,
            *LIMITS,
            "--network",
            network,
            *place,
            f"--volume={volume}:/srv/fourfold",
        ]
        self("run", *options, role, *words)

    def wait_until_ready(self, role: str, seconds: float) -> None:
        """Repeat the image's health check until it succeeds."""
        deadline = time.monotonic() + seconds
        while True:
            state = json.loads(self("inspect", role))[0]["State"]
            assert state["Running"], self.logs(role)
            try:
                self("healthcheck", "run", role)
                return
            except AssertionError as error:
                assert time.monotonic() < deadline, f"{error}\n{self.logs(role)}"
            time.sleep(1.0)

    def logs(self, role: str) -> str:
        places = ["--root", f"{self.folder}/store", "--runroot", f"{self.folder}/run", "--storage-driver", "overlay"]
        done = subprocess.run(
            ["podman", *places, "logs", role], capture_output=True, text=True, check=False, timeout=60
        )
        return (done.stdout + done.stderr)[-6000:]

    def end(self, role: str) -> int:
        """Send SIGTERM, and return the exit code."""
        self("kill", "--signal=TERM", role)
        return int(self("wait", role, timeout=30))


@pytest.fixture(scope="module")
def podman() -> Iterator[Podman]:
    """podman with a base image of Debian packages; containers and images go at the end."""
    # podman takes at most 50 characters, and after a hundred runs pytest's own path has more.
    folder = Path(tempfile.mkdtemp(prefix="podman-"))
    podman = Podman(folder)
    packages = "--include=python3-venv,python3-dev,ca-certificates,g++"
    made = subprocess.run(
        ["mmdebstrap", "--variant=minbase", "--dpkgopt=force-unsafe-io", packages, "bookworm", f"{folder}/base.tar"],
        capture_output=True, text=True, check=False, timeout=400,
    )  # fmt: skip
    if made.returncode:
        pytest.skip(f"mmdebstrap cannot make a Debian here: {made.stderr[-500:]}")
    try:
        podman("import", f"{folder}/base.tar", "localhost/debian", timeout=120)
        try:
            podman("run", "--rm", *LIMITS, "--network=none", "localhost/debian", "true")
        except AssertionError as error:
            pytest.skip(f"podman cannot start a container here: {error}")
        yield podman
    finally:
        podman("rm", "--all", "--force", "--time=1", check=False)
        podman("rmi", "--all", "--force", timeout=300, check=False)
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def volume(tmp_path: Path, tiny_model: Callable[..., Path]) -> Path:
    """The folder of a run, which belongs to the user of the images."""
    model = shutil.copytree(tiny_model("llama_tied", 0, "float32"), tmp_path / "model")
    tiny_run.write_run(tmp_path, Path(model.name), prompts_per_step=2, tables=TABLES)
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(recipe.read_text().replace("[reward]", "[reward]\nreplicas = 0"))
    for path in (tmp_path, *tmp_path.rglob("*")):
        os.chown(path, 10001, 10001)
    return tmp_path


def make_certificates(podman: Podman, volume: Path) -> None:
    options = ["--rm", *LIMITS, "--network=none", f"--volume={volume}:/srv/fourfold", "--entrypoint=fourfold"]
    podman("run", *options, "coordinator", "certs", "certs", "--recipe", "recipe.toml")


@pytest.mark.timeout(1200)
def test_small_images_start_become_ready_and_end(podman: Podman, volume: Path) -> None:
    for target in ("coordinator", "reward"):
        podman.build(target, timeout=500)
    make_certificates(podman, volume)
    podman.start("coordinator", volume, "none")
    podman.start("reward", volume, "container:coordinator", "--coordinator", "127.0.0.1:50050")
    for role in ("coordinator", "reward"):
        podman.wait_until_ready(role, 90)
        assert podman("exec", role, "id", "--user").strip() == "10001"
        assert "Uid:\t10001\t10001" in podman("exec", role, "cat", "/proc/1/status")
    ledger = volume / "runs/tiny/ledger.sqlite"
    assert ledger.exists() and ledger.stat().st_uid == 10001
    assert podman.end("reward") == 0, podman.logs("reward")
    # A run that was ended before its last step, as a shell tells it; the next start continues it.
    assert podman.end("coordinator") == 143, podman.logs("coordinator")


@pytest.mark.timeout(7200)
def test_the_images_of_all_services_train(podman: Podman, volume: Path) -> None:
    for target in ("coordinator", "reward", "trainer", "rollout", "reference", "gateway", "ray"):
        podman.build(target, timeout=1800)
    make_certificates(podman, volume)
    podman.start("coordinator", volume, "none")
    for role in ("reward", "trainer", "rollout"):
        podman.start(role, volume, "container:coordinator", "--coordinator", "127.0.0.1:50050")
    assert int(podman("wait", "coordinator", timeout=900)) == 0, "".join(map(podman.logs, PORTS))
    assert len((volume / "runs/tiny/metrics.jsonl").read_text().splitlines()) == 3
    for role in ("reward", "trainer", "rollout"):
        assert podman.end(role) == 0, podman.logs(role)
    options = ["--rm", *LIMITS, "--network=none"]
    assert "ray, version" in podman("run", *options, "ray", "ray", "--version")
    for role in ("run", "serve"):
        podman("run", *options, "ray", "fourfold", role, "--help")
