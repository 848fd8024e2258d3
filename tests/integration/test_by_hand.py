"""The run that the README puts together by hand, with the README's own commands: TLS, tokens, and every engine real.

Changed are only the ports, the model (a tiny one) and what the recipe needs to be over soon. The
tests share one deployment and come in the order of its life.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import pytest

from fourfold import config, errors
from fourfold.config import Config, SecurityConfig
from fourfold.host.process_tree import descendants
from fourfold.reward.client import AsyncRewardClient
from fourfold.rpc.channel import open_channel
from fourfold.security.access import Security
from fourfold.security.material import server_name
from fourfold.security.principal import Principal
from tests.fakes.command_line import listening, until
from tests.support.rollout_process import free_port
from tests.support.scrape import check_exported, http, parse, value

pytestmark = [pytest.mark.integration, pytest.mark.timeout(200), pytest.mark.slow]

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
RECIPE = "recipes/by_hand.toml"
MODEL = "builtin:smollm2-135m-instruct"
START_SECONDS = 150.0
LOOPBACK = {"0100007F", "0000000000000000FFFF00000100007F"}  # 127.0.0.1 as /proc/net writes it
# A model of random weights answers nothing; it does write texts of different lengths.
SCORER = """
from fourfold_reward import ScoreInput


def score(sample: ScoreInput) -> float:
    return len(sample.completion) % 5 / 4
"""


def readme_commands() -> list[str]:
    """The block of the README that starts the services."""
    blocks = re.findall(r"^```[a-z]*\n(.*?)^```$", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    (block,) = [block for block in blocks if "fourfold serve coordinator" in block] or [""]
    assert block, "the README shows no run that is put together by hand"
    return [line for line in block.splitlines() if line.strip()]


@dataclass
class ByHand:
    """A folder with a recipe, certificates and the processes that were started in it."""

    root: Path
    model: Path
    ports: dict[str, int]
    """By the ports of the README."""
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    rollout: str = ""
    """The command of the rollout service, which `target` starts."""

    def words(self, line: str) -> list[str]:
        """The words of a README's command, for this folder."""
        for port, ours in self.ports.items():
            line = line.replace(f"127.0.0.1:{port}", f"127.0.0.1:{ours}")
        first, *words = shlex.split(line.replace(MODEL, str(self.model)), comments=True)
        return [str(BIN / first), *words]

    def start(self, name: str, line: str) -> subprocess.Popen[bytes]:
        """Start a command; its output is `output(name)`."""
        with (self.root / f"{name}.out").open("wb") as file:
            self.processes[name] = subprocess.Popen(
                self.words(line), cwd=self.root, stdin=subprocess.DEVNULL, stdout=file, stderr=file,
                start_new_session=True,
            )  # fmt: skip
        return self.processes[name]

    def run(self, line: str, **env: str) -> subprocess.CompletedProcess[str]:
        """Run a command to its end, without a terminal; who asks gets an empty line."""
        return subprocess.run(
            self.words(line), cwd=self.root, input="\n", capture_output=True, text=True, timeout=60,
            env={**os.environ, **env}, start_new_session=True, check=False,
        )  # fmt: skip

    def output(self, name: str) -> str:
        return (self.root / f"{name}.out").read_text(errors="replace")

    def target(self, name: str) -> str:
        """Where a service listens; waits until it is ready."""
        if name == "rollout" and name not in self.processes:
            self.start(name, self.rollout)
        until(lambda: "READY " in self.output(name) or self.processes[name].poll() is not None, START_SECONDS)
        found = re.search(r"^READY (\S+)$", self.output(name), re.MULTILINE)
        assert found, self.output(name)
        return found[1]

    def pids(self) -> dict[int, str]:
        """Everything that works in this folder or was started by what does."""
        own = {process.pid for process in self.processes.values() if process.poll() is None}
        found = dict.fromkeys(own | descendants(own), "")
        for path in Path("/proc").glob("[0-9]*"):
            try:
                if (path / "cwd").readlink() == self.root:
                    found[int(path.name)] = ""
            except OSError:
                continue
        return found

    def left(self) -> dict[int, str]:
        """Return the processes that are left after a moment: a guard ends right after the process that it guards."""
        end = time.monotonic() + 3
        while (found := self.pids()) and time.monotonic() < end:
            time.sleep(0.05)
        return found

    def end(self, name: str) -> int:
        """Send SIGTERM and return the exit code."""
        self.processes[name].terminate()
        return self.processes[name].wait(20)


def unused_ports(count: int) -> list[int]:
    ports = set[int]()
    while len(ports) < count:
        ports.add(free_port())
    return list(ports)


def tiny(recipe: Config, model: Path, public_port: int) -> Config:
    """The README's recipe, with two steps of a tiny model."""
    tables = recipe.model_dump()
    tables["steps"] = 2
    tables["model"] |= {"source": str(model)}
    tables["batch"] |= {"prompts_per_step": 2, "group_size": 4, "tokens_per_micro_batch": 256}
    tables["sampling"] |= {"max_new_tokens": 8}
    tables["data"]["train"][0]["size"] = 16
    tables["reward"] = {"function": "scorer.py:score"}
    tables["metrics"] |= {"endpoint": True}
    tables["rollout"] |= {"public_listen": f"127.0.0.1:{public_port}", "max_concurrent_samples": 32}
    return Config.model_validate(tables)


@pytest.fixture(scope="module")
def by_hand(tmp_path_factory: pytest.TempPathFactory, tiny_model: Callable[..., Path]) -> Iterator[ByHand]:
    """Everything of the README's block is started, the coordinator last."""
    root = tmp_path_factory.mktemp("by-hand")
    made = ByHand(root, tiny_model("llama_tied"), dict(zip(("50050", "50060"), unused_ports(2), strict=True)))
    (root / "recipes").mkdir()
    (root / RECIPE).write_text(config.dump(tiny(config.load(ROOT / RECIPE), made.model, made.ports["50060"])))
    (root / "scorer.py").write_text(SCORER)
    (root / "examples").symlink_to(ROOT / "examples")
    certs, *services, watch = [line for line in readme_commands() if line.startswith("fourfold ")]
    done = made.run(certs)
    assert done.returncode == 0, done.stderr
    (root / "token").write_text(done.stdout.split()[-1])
    try:
        lines = {line.split()[2]: line for line in reversed(services)}  # any order will do
        assert set(lines) == {"coordinator", "rollout", "trainer", "reward"}
        # Started by the first test that needs it: the run ends soon after, and some tests are about joining a run.
        made.rollout = lines.pop("rollout")
        for role, line in lines.items():
            made.start(role, line)
        made.target("coordinator")
        made.start("watch", watch)
        yield made
    finally:
        for pid in made.pids():
            try:
                os.kill(pid, 9)
            except ProcessLookupError:
                continue
        for process in made.processes.values():
            process.wait(10)


async def test_who_has_no_certificate_of_this_ca_is_refused_and_both_sides_say_so(by_hand: ByHand) -> None:
    certs, other = by_hand.root / "certs", by_hand.root / "other"
    assert by_hand.run(f"fourfold certs {other} --member reward-1").returncode == 0
    coordinator, reward = Principal("coordinator", "coordinator-0"), Principal("reward", "reward-0")
    ours = Security.load(SecurityConfig(directory=str(certs)), coordinator)
    theirs = Security.load(SecurityConfig(directory=str(other)), coordinator)
    assert ours and theirs
    stranger = grpc.ssl_channel_credentials(ours.material.authority, theirs.material.key, theirs.material.certificate)
    name = [("grpc.default_authority", server_name(reward))]
    target = by_hand.target("reward")
    refused = r"cannot connect: it hung up at once: .* or it refuses our certificate"
    for channel, text in (
        (grpc.aio.insecure_channel(target), refused),
        (open_channel(target, Security.for_agent(certs / "ca.pem"), server=reward), refused),
        (grpc.aio.secure_channel(target, stranger, options=name), refused),
        (open_channel(target, theirs, server=reward), "cannot connect: its certificate is not of our CA"),
        (open_channel(target, ours, server=coordinator), "cannot connect: another member answers there"),
    ):
        with pytest.raises(errors.Unavailable, match=text):
            await AsyncRewardClient(channel, peer="reward-0").get_info(timeout=10)
        await channel.close()
    log = by_hand.output("reward")
    for reason in ("WRONG_VERSION_NUMBER", "PEER_DID_NOT_RETURN_A_CERTIFICATE", "CERTIFICATE_VERIFY_FAILED"):
        assert re.search(rf"Handshake failed with error SSL_ERROR_SSL: .*{reason}", log)
    async with open_channel(target, ours, server=reward) as channel:
        assert (await AsyncRewardClient(channel, peer="reward-0").get_info(timeout=10)).name.startswith(
            "scorer.py:score"
        )


def test_a_service_with_certificates_of_another_ca_does_not_join(by_hand: ByHand) -> None:
    recipe = (by_hand.root / RECIPE).read_text().replace('directory = "certs"', 'directory = "other"')
    (by_hand.root / "other.toml").write_text(recipe)
    (line,) = [line for line in readme_commands() if line.startswith("fourfold serve reward")]
    by_hand.target("coordinator")
    by_hand.start("other", line.replace(RECIPE, "other.toml") + " --member-id reward-1")
    said = (
        r"registration failed; retrying until the coordinator accepts: .* its certificate is not of our CA; both need"
    )
    until(lambda: re.search(said, by_hand.output("other")))
    assert by_hand.end("other") == 0
    assert "reward-1" not in by_hand.output("coordinator")


async def test_prometheus_gets_the_metrics_of_every_service(by_hand: ByHand) -> None:
    """The coordinator is asked first: a run cannot end before its rollout service has started."""
    for role in ("coordinator", "reward", "trainer", "rollout"):
        by_hand.target(role)
        (target,) = re.findall(r"metrics endpoint started: http://(\S+)/metrics", by_hand.output(role))
        code, _, page = await http(target)
        families = parse(page)
        check_exported(families, role)
        ready = value(families, "fourfold_ready")
        assert (code, ready) == (200, 1)
        if role == "rollout":  # its engine is a process of its own
            assert value(families, "fourfold_child_processes") >= 1
            assert value(families, "fourfold_children_resident_memory_bytes") > 1 << 26


def test_an_agent_needs_the_token_and_gets_its_answer(by_hand: ByHand) -> None:
    by_hand.target("rollout")
    (line,) = [line for line in readme_commands() if "examples/agent.py" in line]
    for token, said in (
        ("", "no bearer token; send the metadata `authorization: Bearer TOKEN`"),
        ("x" * 43, "unknown bearer token; ask the owner of this deployment for one"),
    ):
        done = by_hand.run(line, FOURFOLD_TOKEN=token)
        assert (done.returncode, done.stdout.removeprefix("Token: ").strip()) == (1, "")
        message = rf"agent: rollout service at \S+, GetInfo: {re.escape(said)}"
        assert re.fullmatch(message, done.stderr.splitlines()[-1])
        refusal = rf"/fourfold\.rollout\.v1\.RolloutService/GetInfo refused to ipv\S+ at \S+ {said.partition(';')[0]};"
        assert re.search(refusal, by_hand.output("rollout"))
    done = by_hand.run(line, FOURFOLD_TOKEN=(by_hand.root / "token").read_text())
    assert done.returncode == 0, done.stderr
    tokens = re.search(r"^\[(\d+) tokens, sampled by policy version \d+\]$", done.stdout, re.MULTILINE)
    assert tokens and 1 <= int(tokens[1]) <= 64


def test_the_run_is_watched_and_finished(by_hand: ByHand) -> None:
    by_hand.target("rollout")
    assert by_hand.processes["coordinator"].wait(START_SECONDS) == 0, by_hand.output("coordinator")
    run = by_hand.root / "runs" / "by-hand"
    report = json.loads((run / "report.json").read_text())
    assert (report["steps"], report["skipped_steps"], report["policy_version"]) == (2, 0, 2)
    assert report["peak_memory_bytes"] > 1 << 30, "trainer and rollout service are counted, whoever started them"
    assert report["peak_memory_without"] == []
    rows = [json.loads(row) for row in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2]
    assert all(row["mismatch/logprob_diff_mean"] < 0.05 for row in rows)
    assert all(364 < row["security/certificate_seconds"] / 86_400 < 365 for row in rows)
    assert (run / "model" / "model.safetensors").exists() and (run / "checkpoints" / "step-000002").exists()
    assert "runs/by-hand/report.json" in by_hand.output("coordinator")
    assert by_hand.processes["watch"].wait(20) == 0, by_hand.output("watch")
    assert "step 1/2  reward " in by_hand.output("watch") and "step 2/2  reward " in by_hand.output("watch")


def test_everything_listens_on_loopback_and_ends_on_a_signal(by_hand: ByHand) -> None:
    for name in ("rollout", "trainer", "reward"):
        by_hand.target(name)
    sockets = listening(by_hand.pids())
    assert len(sockets) >= 4  # two of the rollout service
    assert {address.partition(":")[0] for address in sockets} <= LOOPBACK
    ends = {name: by_hand.end(name) for name in ("rollout", "trainer", "reward")}  # all, for the tests after this
    for name, code in ends.items():
        assert code == 0, by_hand.output(name)
        assert "Traceback" not in by_hand.output(name)
    assert by_hand.left() == {}


def test_a_coordinator_that_waits_for_services_ends_on_a_signal(by_hand: ByHand) -> None:
    by_hand.start("second", f"fourfold serve coordinator {RECIPE} --run-dir runs/second")
    by_hand.target("second")
    assert {address.partition(":")[0] for address in listening(by_hand.pids())} <= LOOPBACK
    assert by_hand.end("second") == 128 + 15
    assert by_hand.left() == {}


@pytest.mark.parametrize("role", ["coordinator", "rollout", "trainer", "reward"])
def test_without_tls_no_service_listens_beyond_loopback(
    tmp_path: Path, tiny_model: Callable[..., Path], role: str
) -> None:
    recipe = tiny(config.load(ROOT / RECIPE), tiny_model("llama_tied"), 1)
    recipe = recipe.model_copy(update={"security": SecurityConfig()})
    (tmp_path / "plain.toml").write_text(config.dump(recipe))
    (tmp_path / "scorer.py").write_text(SCORER)
    words = f"serve {role} plain.toml --listen 0.0.0.0:0 --advertise trainer.internal".split()
    done = subprocess.run(
        [str(BIN / "fourfold"), *words], cwd=tmp_path, stdin=subprocess.DEVNULL, capture_output=True, text=True,
        timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.splitlines()[-1] == (
        "fourfold: listen = '0.0.0.0:0': without TLS a service listens on loopback only; use 127.0.0.1, or make "
        "certificates with `fourfold certs DIR` and set security.directory"
    )
