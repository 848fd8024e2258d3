"""One definition is enough: a loss of another distribution is parsed, planned, trained and documented."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fourfold import config as configuration
from fourfold.algorithm import registry, tables
from fourfold.algorithm.advantages import ADVANTAGES
from fourfold.algorithm.losses import LOSSES, LossInputs, PolicyLoss, ReinforceLoss, SampleInputs, SampleLoss, TokenLoss
from fourfold.algorithm.registry import Definition
from fourfold.algorithm.state import AlgorithmState
from fourfold.cli.main import main
from fourfold.errors import ConfigError
from fourfold.plan.algorithm import algorithm_plan
from fourfold_trainer.service import metrics
from fourfold_trainer.step.train_step import train_step
from tests.fakes.toy_engine import ToyEngine
from tests.fakes.trainer_engine import group_of

ROOT = Path(__file__).parents[3]
DOCS = (ROOT / "docs/algorithms.md").read_text(encoding="utf-8")
DEFINITIONS: list[type[Definition]] = [*map(LOSSES.find, LOSSES.kinds()), *map(ADVANTAGES.find, ADVANTAGES.kinds())]
RECIPE = """\
name = "toy"
steps = 3
[model]
source = "builtin:smollm2-135m-instruct"
max_context_tokens = 64
[data.train]
path = "train.jsonl"
[batch]
prompts_per_step = 2
group_size = 4
[sampling]
max_new_tokens = 16
[algorithm.loss]
kind = "quadratic"
"""


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Install the example of the docs as a distribution; return its entry points."""
    site = tmp_path / "site"
    metadata = site / "my_losses-1.0.dist-info"
    metadata.mkdir(parents=True)
    (site / "my_losses.py").write_text(re.findall(r"```python\n(.*?)```", DOCS, re.DOTALL)[0])
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: my_losses\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[fourfold.losses]\nquadratic = my_losses:Quadratic\n")
    monkeypatch.syspath_prepend(str(site))
    importlib.invalidate_caches()
    yield metadata / "entry_points.txt"
    sys.modules.pop("my_losses", None)


def write(folder: Path, text: str = RECIPE) -> Path:
    path = folder / "recipe.toml"
    path.write_text(text)
    return path


# A class of a file


def test_a_recipe_names_a_loss_of_pairs_in_a_file(tmp_path: Path) -> None:
    kind = "algorithm.loss.kind=examples/losses/focal_pairs.py:FocalPairs"
    config = configuration.load(ROOT / "recipes/dpo.toml", [kind, "algorithm.loss.gamma=1.0"])
    loss = config.algorithm.loss
    assert isinstance(loss, SampleLoss) and config.prepares_reference
    assert "l = -s(-0.1 d)^1 log s(0.1 d)" in "\n".join(algorithm_plan(config))
    assert configuration.load(write(tmp_path, configuration.dump(config))) == config, "every service reads it again"
    inputs = SampleInputs(
        sums=torch.tensor([-3.0, -9.0, -800.0, -1e4], dtype=torch.float64, requires_grad=True),
        counts=torch.tensor([2, 3, 2, 3]),
        labels=torch.tensor([1.0, 0.0, 0.0, 1.0]),
        reference_sums=torch.tensor([-4.0, -8.0, -700.0, -10.0], dtype=torch.float64),
    )
    found = loss.compute(inputs)
    wrong = 1 / (1 + np.exp(0.2))
    assert found.loss.tolist() == pytest.approx([-wrong * np.log(1 - wrong), 0.1 * (9990 - 100)], rel=1e-12)
    found.loss.sum().backward()  # type: ignore[no-untyped-call]
    assert inputs.sums.grad is not None and bool(inputs.sums.grad.isfinite().all())


@pytest.mark.parametrize(
    ("text", "kind", "message"),
    [
        ("", "none.py:X", "no file .*none.py; a relative path starts from the folder"),
        ("class A: ...", "mine.py:B", "mine.py cannot be used .module .* has no attribute 'B'.; correct the file"),
        ("class A: ...", "mine.py:A", "is not a subclass of Loss"),
        ("1 / 0", "mine.py:A", "mine.py cannot be used .ZeroDivisionError: division by zero.; correct the file"),
        ("class A:", "mine.py:A", "cannot be used .IndentationError: expected an indented block"),
        ("from fourfold import SampleLoss\nclass A(SampleLoss): ...", "mine.py:A", "has no method compute; define it"),
    ],
)
def test_a_file_without_such_a_loss_says_what_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, kind: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(text)
    with pytest.raises(ConfigError, match=message):
        configuration.load(write(tmp_path, RECIPE.replace("quadratic", kind)))


def test_a_file_is_run_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "examples/losses/focal_pairs.py").read_text()
    Path("mine.py").write_text(
        f"{text}\nwith open('runs', 'a') as file:\n    file.write('x')\n\n\nclass Second(FocalPairs):\n    pass\n"
    )
    first, second = LOSSES.find("mine.py:FocalPairs"), LOSSES.find(f"{tmp_path}/mine.py:Second")
    assert issubclass(second, first.__bases__) and Path("runs").read_text() == "x"


def test_a_command_that_reads_recipes_of_others_runs_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_may_run_files", True)
    registry.refuse_files()
    with pytest.raises(ValueError, match="runs none of their files"):
        LOSSES.find(f"{ROOT}/examples/losses/../losses/focal_pairs.py:FocalPairs")


# A definition of another distribution


def test_a_recipe_selects_a_loss_of_another_distribution(installed: Path, tmp_path: Path) -> None:
    config = configuration.load(write(tmp_path, RECIPE + "penalty = 0.5\n"))
    assert config.algorithm.loss.model_dump() == {"kind": "quadratic", "penalty": 0.5}
    assert configuration.load(write(tmp_path, configuration.dump(config))) == config


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ("penalty = -1.0", ":15  algorithm.loss.penalty = -1.0: input should be greater than or equal to 0"),
        ("clip_low = 0.1", "clip_low: no such key for kind = 'quadratic'. Its keys: penalty."),
    ],
)
def test_its_keys_have_rules(installed: Path, tmp_path: Path, keys: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        configuration.load(write(tmp_path, f"{RECIPE}{keys}\n"))


def test_the_plan_prints_its_formula(installed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(write(tmp_path)), "--skip-checks"]) == 0
    assert "loss of a token: l = -A p + 0.1 (p - o)^2." in capsys.readouterr().out


def test_the_trainer_minimises_it(installed: Path, tmp_path: Path) -> None:
    text = RECIPE.replace("group_size = 4", "group_size = 2\nepochs_per_step = 2")
    config = configuration.load(write(tmp_path, text + "[trainer]\nlearning_rate = 20.0\n"))
    engine, state = ToyEngine(config), AlgorithmState()
    # The penalty pulls tokens without an advantage, too.
    samples = [*group_of([0, 1], group="a"), *group_of([3, 1], group="b"), *group_of([1, 1], group="c")]
    for step in (1, 2, 3):
        table = engine.policy.detach().clone()
        old = torch.log_softmax(table, 0).float()
        result = train_step(engine, samples, config, step=step, state=state)  # type: ignore[arg-type]
        state = result.algorithm_state
        assert result.policy_updates == 2 and not torch.equal(engine.policy, table)
        advantages = [part[0] for part in result.targets.advantages]
        distances = []
        for gradient in engine.gradients[-2:]:  # the second update is pulled back to the policy before the step
            table.requires_grad_()
            loss = torch.zeros((), dtype=torch.float64)
            for one, advantage in zip(samples, advantages, strict=True):
                ids = torch.from_numpy(one.token_ids[one.loss_mask]).long()
                p = torch.log_softmax(table, 0)[ids]
                distances += (p - old[ids]).square().tolist()
                loss = loss + (-advantage * p + 0.1 * (p - old[ids]).square()).sum() / 12
            (wanted,) = torch.autograd.grad(loss, table)
            torch.testing.assert_close(gradient, wanted, atol=1e-6, rtol=1e-5)
            table = table.detach() - 20.0 * gradient
        found = metrics.summarise(result, config)
        assert found["quadratic/distance"] == pytest.approx(np.mean(distances), rel=1e-5)


def test_what_a_loss_says_of_itself_does_not_hold_for_a_subclass_that_computes_another() -> None:
    class Narrow(ReinforceLoss):
        clip: float = 0.1

    class Pulled(ReinforceLoss):
        def compute(self, inputs: LossInputs) -> TokenLoss:
            loss = super().compute(inputs).loss + (inputs.logprobs - inputs.old_logprobs).square()
            return TokenLoss(loss=loss)

    class Mixin:
        def compute(self, inputs: LossInputs) -> TokenLoss:
            return TokenLoss(loss=inputs.logprobs)

    class Mixed(Mixin, ReinforceLoss):
        pass

    class Stated(Pulled):
        token_wise = True
        trains_without_advantage = False

        def compute(self, inputs: LossInputs) -> TokenLoss:
            return TokenLoss(loss=-inputs.advantages * inputs.logprobs)

    def said(loss: type[PolicyLoss]) -> tuple[bool, ...]:
        return loss.token_wise, loss.compares_with_old, loss.corrects_lag, loss.trains_without_advantage

    assert said(Narrow) == said(ReinforceLoss) == (True, False, False, False)
    assert said(Pulled) == said(Mixed) == (False, True, False, True)
    assert said(Stated) == (True, True, False, False)


def test_a_metric_of_a_loss_has_a_name_that_can_be_sent() -> None:
    with pytest.raises(ValueError, match=r"a metric named 'a<b>'; write a name such as my-loss/penalty"):
        TokenLoss(loss=torch.zeros(1), means={"a<b>": torch.zeros(1)})


def test_it_is_documented(installed: Path) -> None:
    assert "| `quadratic` | l = -A p + 0.1 (p - o)^2 | `penalty` 0.1 | docs/algorithms.md |\n" in tables.markdown()


def test_an_entry_point_that_is_no_definition_is_named(installed: Path, tmp_path: Path) -> None:
    installed.write_text("[fourfold.advantages]\nwrong = my_losses:Quadratic\n")
    text = RECIPE.replace("[algorithm.loss]", "[algorithm.advantage]").replace("quadratic", "wrong")
    with pytest.raises(
        ConfigError, match=r"fourfold.advantages: wrong = my_losses:Quadratic is not a subclass of AdvantageEstimator"
    ):
        configuration.load(write(tmp_path, text))


@pytest.mark.parametrize("target", ["my_losses:Missing", "no_such_module:Quadratic"])
def test_an_entry_point_that_cannot_be_loaded_is_named(installed: Path, tmp_path: Path, target: str) -> None:
    installed.write_text(f"[fourfold.losses]\nquadratic = {target}\n")
    with pytest.raises(ConfigError, match=f"fourfold.losses: quadratic = {target} cannot be loaded"):
        configuration.load(write(tmp_path))


def test_a_definition_that_raises_is_named(installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = configuration.load(write(tmp_path))

    def formula(self: Definition) -> str:
        raise KeyError("beta")

    monkeypatch.setattr(type(config.algorithm.loss), "formula", formula)
    with pytest.raises(
        ConfigError, match=r"the formula of kind 'quadratic' of my_losses failed \(KeyError: 'beta'\); repair or remove"
    ):
        algorithm_plan(config)
    (tmp_path / "broken_losses.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    installed.write_text("[fourfold.losses]\nquadratic = broken_losses:Quadratic\n")
    with pytest.raises(ConfigError, match=r"broken_losses:Quadratic cannot be loaded \(ZeroDivisionError: division by"):
        configuration.load(write(tmp_path))


def test_without_the_distribution_the_known_kinds_are_listed(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"kind = 'quadratic' is unknown; choose one of .*, gmpo, gspo, "):
        configuration.load(write(tmp_path))


# The definitions of Fourfold


@pytest.mark.parametrize("definition", DEFINITIONS, ids=lambda d: d.__name__)
def test_every_definition_is_complete(definition: type[Definition]) -> None:
    kind = definition.model_fields["kind"].default
    found = definition.model_validate({"kind": kind})
    assert found.formula() and found.source and definition.__doc__
    assert all(not field.is_required() for field in definition.model_fields.values())


def test_kinds_are_compared_nowhere_else() -> None:
    """The name of a loss or estimator decides nothing outside of its definition and the presets.

    The conversion of other systems' configurations names those that it writes.
    """
    kinds = [str(d.model_fields["kind"].default) for d in DEFINITIONS]
    # A schedule of the learning rate is called constant, too.
    comparison = re.compile(rf"""(?<!schedule )(==|!=|\bin|\bcase) \(?"({"|".join(map(re.escape, kinds))})\"""")
    sources = [*ROOT.glob("fourfold/**/*.py"), *ROOT.glob("tools/**/*.py"), *ROOT.glob("services/*/fourfold_*/**/*.py")]
    sources = [path for path in sources if path.parent.name != "migrate"]
    assert [str(p) for p in sources if comparison.search(p.read_text(encoding="utf-8"))] == []


def test_the_docs_have_the_tables() -> None:
    begin, end = "<!-- begin tables -->\n", "<!-- end tables -->"
    written = DOCS.partition(begin)[2].partition(end)[0]
    assert written.strip() == tables.markdown().strip(), "paste the output of `python -m fourfold.algorithm.tables`"


# Reading a step

STEP: dict[str, str] = {
    "services/coordinator/fourfold_coordinator/training/loop.py": "train_step(",
    "services/trainer/fourfold_trainer/step/train_step.py": "engine.update_policy(",
    "services/trainer/fourfold_trainer/step/optimizer_step.py": "policy.optimizer_step(",
}


def test_a_step_is_read_in_three_files() -> None:
    texts: dict[str, Any] = {path: (ROOT / path).read_text(encoding="utf-8") for path in STEP}
    assert sum(len(text.splitlines()) for text in texts.values()) <= 700
    assert all(call in texts[path] for path, call in STEP.items())
    optimizer_step = texts["services/trainer/fourfold_trainer/step/optimizer_step.py"]
    order = ["policy.logprobs(", "policy.backward(", "policy.optimizer_step("]
    assert [optimizer_step.index(call) for call in order] == sorted(optimizer_step.index(call) for call in order)
    assert "algorithm.loss.compute(inputs)" in optimizer_step and "inputs = LossInputs(" in optimizer_step
