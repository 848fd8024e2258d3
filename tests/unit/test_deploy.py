"""The files of deploy/: they parse, their commands are accepted, and the chart fits the schemas of Kubernetes."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from fourfold.cli.main import parse

DEPLOY = Path(__file__).parents[2] / "deploy"
PORTS = dict(re.findall(r"FOURFOLD_ROLE=(\w+) FOURFOLD_PORT=(\d+)", (DEPLOY / "Dockerfile").read_text()))
KUBERNETES = "1.33"


def commands() -> Iterator[tuple[str, list[str]]]:
    """Yield file name and words of each command `fourfold ...` in the unit files and the SLURM script."""
    for path in sorted((DEPLOY / "systemd").glob("*.service")):
        for line in re.findall(r"^ExecStart=\S+/fourfold (.*)$", path.read_text(), re.MULTILINE):
            line = line.replace("%i", "trainer").replace("$ARGUMENTS", "--rank 8-15")
            yield path.name, shlex.split(re.sub(r"\$\{\w+\}", "127.0.0.1:1", line))
    for role, line in re.findall(r"^ *on \S+ (\w+) (--.*)$", (DEPLOY / "slurm/run.sbatch").read_text(), re.MULTILINE):
        words = shlex.split(line.replace("$begin-$end", "0-7"))
        yield "run.sbatch", ["serve", role, "recipe.toml", *words]


@pytest.mark.parametrize(("name", "words"), list(commands()))
def test_commands_are_accepted(name: str, words: list[str]) -> None:
    parse(words[0], words[1:])


def test_there_are_commands_in_every_kind_of_file() -> None:
    assert [name for name, _ in commands()] == [
        "fourfold-coordinator.service", "fourfold@.service", *["run.sbatch"] * 4
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["slurm/run.sbatch", "entrypoint"])
def test_scripts_parse(name: str) -> None:
    shell = "sh" if name == "entrypoint" else "bash"
    assert subprocess.run([shell, "-n", str(DEPLOY / name)], check=False, timeout=10).returncode == 0


def test_the_compose_file_shares_memory_between_trainer_and_engine() -> None:
    services = yaml.safe_load((DEPLOY / "compose/compose.yaml").read_text())["services"]
    assert set(services) <= set(PORTS)
    assert services["trainer"]["ipc"] == "shareable" and services["trainer"]["shm_size"] == "16gb"
    assert services["rollout"]["ipc"] == services["rollout"]["pid"] == "service:trainer"
    assert services["rollout"]["hostname"] == services["trainer"]["hostname"]
    for role, service in services.items():
        words = service.get("command", [])
        assert parse("serve", [role, "recipe.toml", *words])[1].coordinator == (
            "" if role == "coordinator" else f"coordinator:{PORTS['coordinator']}"
        )


def test_prometheus_and_kuberay_files_parse() -> None:
    targets = yaml.safe_load((DEPLOY / "prometheus/prometheus.yml").read_text())["scrape_configs"][1]["static_configs"]
    unit = (DEPLOY / "systemd/fourfold-coordinator.service").read_text()
    assert f"--metrics-listen {targets[0]['targets'][0]}" in unit
    spec = yaml.safe_load((DEPLOY / "kuberay/rayjob.yaml").read_text())["spec"]
    parse("run", shlex.split(spec["entrypoint"].replace("$(hostname -i)", "10.0.0.1"))[2:])


def rendered(**values: Any) -> list[dict[str, Any]]:
    helm = pytest.importorskip("helm_python")
    with helm.Chart.load(str(DEPLOY / "helm/fourfold")) as chart:
        files = chart.render({"recipe": "name = 'x'\n", **values}, name="demo", namespace="test")
    documents = [yaml.safe_load_all(text) for name, text in sorted(files.items()) if name.endswith(".yaml")]
    return [document for several in documents for document in several if document]


@pytest.mark.parametrize("reference", [False, True])
def test_the_chart_fits_the_schemas_of_kubernetes(reference: bool) -> None:
    validate = pytest.importorskip("kubernetes_validate").validate
    documents = rendered(reference=reference)
    assert len(documents) == 5 + reference
    for document in documents:
        validate(document, KUBERNETES, strict=True)
        for container in (
            document["spec"].get("template", {}).get("spec", {}).get("containers", []) if "spec" in document else []
        ):
            role = container["name"]
            parse("serve", [role, "recipe.toml", *container["args"]])
            assert container["ports"][0]["containerPort"] == int(PORTS[role])
            for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
                words = container[probe]["exec"]["command"]
                assert parse(words[1], words[2:])[1].target == f"127.0.0.1:{PORTS[role]}"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_unit_files_have_known_settings(tmp_path: Path) -> None:
    units = []
    for path in (DEPLOY / "systemd").glob("*.service"):
        unit = tmp_path / path.name.replace("@", "@trainer")
        unit.write_text(path.read_text().replace("/opt/fourfold/bin/fourfold", "/bin/true"))
        units.append(str(unit))
    done = subprocess.run(
        ["systemd-analyze", "verify", *units], capture_output=True, text=True, check=False, timeout=30
    )
    assert [line for line in done.stderr.splitlines() if str(tmp_path) in line] == []
