"""The files of deploy/: they parse, their commands are accepted, and the chart fits the schemas of Kubernetes."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from helm_python import Chart
from kubernetes_validate import validate

from fourfold.cli.main import parse
from fourfold.metrics import METRICS

DEPLOY = Path(__file__).parents[2] / "deploy"
PORTS = dict(re.findall(r"FOURFOLD_ROLE=(\w+) FOURFOLD_PORT=(\d+)", (DEPLOY / "Dockerfile").read_text()))
KUBERNETES = "1.33"
MONITORING = DEPLOY.parent / "docs/monitoring.md"


def commands() -> Iterator[tuple[str, list[str]]]:
    """Yield file name and words of each command `fourfold ...` in the unit files."""
    for path in sorted((DEPLOY / "systemd").glob("*.service")):
        for line in re.findall(r"^ExecStart=\S+/fourfold (.*)$", path.read_text(), re.MULTILINE):
            line = line.replace("%i", "trainer").replace("$ARGUMENTS", "--rank 8-15")
            yield path.name, shlex.split(re.sub(r"\$\{\w+\}", "127.0.0.1:1", line))


@pytest.mark.parametrize(("name", "words"), list(commands()))
def test_commands_are_accepted(name: str, words: list[str]) -> None:
    parse(words[0], words[1:])


def test_there_are_commands_in_every_unit_file() -> None:
    assert [name for name, _ in commands()] == ["fourfold-coordinator.service", "fourfold@.service"]


SLURM_PROGRAMS = {
    "scontrol": 'echo "$NODES"',
    "getent": 'echo "10.0.0.${2#node} STREAM $2"',
    # The coordinator ends when all services have started, and the script ends the others.
    "srun": """echo "$@" >> "$STARTED"
case "$*" in *"serve coordinator"*) tries=0
  while [ "$(wc -l < "$STARTED")" -lt "$COUNT" ] && [ $tries -lt 200 ]; do tries=$((tries + 1)); sleep 0.05; done
esac""",
}
SLURM_RECIPE = """
name = "x"
steps = 1
model = {source = "m", max_context_tokens = 64}
data = {train = {path = "train.jsonl"}}
sampling = {max_new_tokens = 8}
batch = {prompts_per_step = 2, group_size = 2}
trainer = {ranks = 4, replicas = 0}
rollout = {replicas = 0}
"""
REWARD = '[[reward]]\nname = "reward"\nfunction = "last_number"\nreplicas = 0\n'
JUDGE = REWARD.replace('"reward"', '"Judge_2"').replace("replicas = 0", "replicas = 2")
KL = "algorithm = {kl = {coef = 0.01}}\n"


@pytest.mark.parametrize(
    ("nodes", "more", "besides"),
    [
        (["node1"], REWARD, {"reward-0": ("reward", "reward")}),
        (
            ["node1", "node2"],
            f"{KL}reference = {{replicas = 0}}\n{REWARD}{JUDGE}",
            {
                "reference-0": ("reference", ""),
                "reward-0": ("reward", "reward"),
                "reward-judge-2-0": ("reward", "Judge_2"),
                "reward-judge-2-1": ("reward", "Judge_2"),
            },
        ),
        (["node1"], f'{KL}[[reward]]\ntarget = "10.0.0.9:1"\n', {"reference-0": ("reference", "")}),
        (
            ["node1"],
            'agents = {source = "tasks"}\ngateway = {replicas = 0}\n'
            f'environment = {{replicas = 1, kind = "python", source = "e.py:E"}}\n{REWARD}',
            {"gateway-0": ("gateway", ""), "environment-0": ("environment", "")},  # agents give their own rewards
        ),
    ],
    ids=["one node", "two nodes", "a scorer elsewhere", "agents"],
)
def test_a_slurm_job_starts_what_the_recipe_asks_for(
    nodes: list[str], more: str, besides: dict[str, tuple[str, str]], tmp_path: Path
) -> None:
    for name, script in SLURM_PROGRAMS.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "recipe.toml").write_text(SLURM_RECIPE + more)
    path = f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "PYTHONPATH": os.pathsep.join(part for part in sys.path if part)}
    env |= {"SLURM_JOB_NODELIST": "node[1-2]", "NODES": "\n".join(nodes), "STARTED": f"{tmp_path}/started"}
    env["COUNT"] = str(count := 2 + len(nodes) + len(besides))
    line = ["bash", str(DEPLOY / "slurm/run.sbatch"), str(tmp_path / "recipe.toml"), "6000"]
    subprocess.run(line, env=env, check=True, timeout=60)
    found: dict[str, tuple[str, str]] = {}
    ranks, listening = [], []
    for started in (tmp_path / "started").read_text().splitlines():
        where, _, words = started.partition(" fourfold ")
        _, args = parse("serve", words.split()[1:])
        found |= {args.member_id: (args.role, args.scorer)} if args.member_id else {}
        ranks += list(args.rank or ())
        listening.append(args.listen)
        address = "127.0.0.1" if len(nodes) == 1 else f"10.0.0.{re.findall('--nodelist=node(.)', where)[0]}"
        assert args.listen.startswith(f"{address}:") and (args.role == "coordinator") == (not args.coordinator)
        assert args.role != "rollout" or f"--nodelist={nodes[-1]} " in where
    assert found == besides and sorted(ranks) == [0, 1, 2, 3]
    assert len(listening) == len(set(listening)) == count


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


def test_prometheus_scrapes_the_port_of_the_unit() -> None:
    targets = yaml.safe_load((DEPLOY / "prometheus/prometheus.yml").read_text())["scrape_configs"][1]["static_configs"]
    unit = (DEPLOY / "systemd/fourfold-coordinator.service").read_text()
    assert f"--metrics-listen {targets[0]['targets'][0]}" in unit


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool, of the Debian package prometheus")
def test_prometheus_accepts_its_file() -> None:
    line = ["promtool", "check", "config", str(DEPLOY / "prometheus/prometheus.yml")]
    done = subprocess.run(line, capture_output=True, text=True, check=False, timeout=30)
    assert done.returncode == 0, done.stdout + done.stderr


def dashboard_expressions() -> list[str]:
    panels = json.loads((DEPLOY / "grafana/fourfold.json").read_text())["panels"]
    return [target["expr"] for panel in panels for target in panel.get("targets", ())]


def test_the_dashboard_shows_metrics_that_exist() -> None:
    documented = set(re.findall(r"^\| [^|]+ \| `(fourfold_\w+)` ", MONITORING.read_text(), re.MULTILINE))
    expressions = dashboard_expressions()
    assert len(expressions) > 30
    for expression in expressions:
        names = re.findall(r"\b((?:fourfold|process)_\w+)\{", expression)
        assert names, expression
        for name in names:
            assert name.removesuffix("_bucket") in documented or name.startswith("process_"), expression
        for metric in re.findall(r'metric="([^"]+)"', expression):
            assert metric in METRICS, expression


def test_the_dashboard_is_built_from_its_table() -> None:
    line = [sys.executable, "-c", "import build, json; print(json.dumps(build.build()))"]
    done = subprocess.run(line, cwd=DEPLOY / "grafana", capture_output=True, text=True, check=True, timeout=30)
    assert json.loads(done.stdout) == json.loads((DEPLOY / "grafana/fourfold.json").read_text())


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool, of the Debian package prometheus")
def test_prometheus_parses_the_expressions_of_the_dashboard(tmp_path: Path) -> None:
    rules = [
        {"record": f"panel:{number}", "expr": expression.replace("$run", "demo")}
        for number, expression in enumerate(dashboard_expressions())
    ]
    (tmp_path / "rules.yml").write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
    line = ["promtool", "check", "rules", str(tmp_path / "rules.yml")]
    done = subprocess.run(line, capture_output=True, text=True, check=False, timeout=30)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_pods_of_kuberay_fit_the_schemas_of_kubernetes() -> None:
    spec = yaml.safe_load((DEPLOY / "kuberay/rayjob.yaml").read_text())["spec"]
    parse("run", shlex.split(spec["entrypoint"].replace("$(hostname -i)", "10.0.0.1"))[2:])
    cluster = spec["rayClusterSpec"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "ray"}, **group["template"]}
        validate(pod, KUBERNETES, strict=True)


def rendered(**values: Any) -> list[dict[str, Any]]:
    with Chart.load(str(DEPLOY / "helm/fourfold")) as chart:
        files = chart.render({"recipe": "name = 'x'\n", **values}, name="demo", namespace="test")
    documents = [yaml.safe_load_all(text) for name, text in sorted(files.items()) if name.endswith(".yaml")]
    return [document for several in documents for document in several if document]


@pytest.mark.parametrize("reference", [False, True])
def test_the_chart_fits_the_schemas_of_kubernetes(reference: bool) -> None:
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


def secret(folder: Path, *more: str) -> None:
    """Write the files that a secret with the certificates of a run holds."""
    folder.mkdir()
    roles = ("coordinator", "trainer", "rollout", "reward", "reference", "viewer", "operator")
    for name in ("ca.pem", *(f"{role}-0.pem" for role in roles), *more):
        (folder / name).write_text(name)


@pytest.mark.parametrize("more", [(), ("revoked.txt", "tokens.txt")])
def test_a_pod_has_the_keys_of_its_own_roles_only(more: tuple[str, ...], tmp_path: Path) -> None:
    secret(tmp_path / "secret", *more)
    pods = [pod for document in rendered(reference=True) if (pod := document.get("spec", {}).get("template"))]
    assert len(pods) == 4
    for number, pod in enumerate(pods):
        certs = tmp_path / f"certs-{number}"
        certs.mkdir()
        shell, option, script = pod["spec"]["initContainers"][0]["command"]
        script = script.replace("/secret", str(tmp_path / "secret")).replace("/certs/", f"{certs}/")
        subprocess.run([shell, option, script], check=True, timeout=10)
        own = {f"{container['name']}-0.pem" for container in pod["spec"]["containers"]}
        assert {path.name for path in certs.iterdir()} == {"ca.pem", *own, *more}
        assert {path.stat().st_mode & 0o777 for path in certs.iterdir()} == {0o600}


@pytest.mark.parametrize("page", [DEPLOY / "helm/fourfold/values.yaml", DEPLOY.parent / "docs/deploy.md"])
def test_the_secret_of_the_printed_command_has_no_key_of_the_ca(page: Path, tmp_path: Path) -> None:
    secret(tmp_path / "certs", "ca-key.pem", "issued.txt", "tokens.txt")
    (line,) = re.findall(r"kubectl create secret .*", page.read_text())
    script = f'kubectl() {{ printf "%s\\n" "$@"; }}; {line}'
    done = subprocess.run(["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True, timeout=10)
    files = {Path(word.partition("=")[2]).name for word in done.stdout.split() if word.startswith("--from-file=")}
    assert files == {path.name for path in (tmp_path / "certs").iterdir()} - {"ca-key.pem", "issued.txt"}


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


def test_systemd_signals_the_service_and_not_its_ranks_and_engines() -> None:
    for path in (DEPLOY / "systemd").glob("*.service"):
        assert "\nKillMode=mixed\n" in path.read_text()
