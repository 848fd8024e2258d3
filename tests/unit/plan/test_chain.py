"""Recipes that run in order: how they depend on each other, and what their models have in common."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fourfold.algorithm.losses import BradleyTerryLoss, SampleLoss, StepLabelsLoss
from fourfold.cli import main as cli_main
from fourfold.errors import ConfigError
from fourfold.model import folder as model_folder
from fourfold.model import runs
from fourfold.plan.chain import (
    Link,
    check_order,
    check_run_sources,
    describe_chain,
    disk_bytes,
    expected_run,
)
from tests.fakes.toy import make_config
from tests.unit.model.test_folder import write_model

ROOT = Path(__file__).parents[3]
LADDER = [f"recipes/ladder/{name}.toml" for name in ("sft", "rm", "ppo")]


def make_link(root: Path, name: str, source: str = "base", **changes: Any) -> Link:
    config = make_config(root, name=name, model={"source": source, "max_context_tokens": 64}, **changes)
    return Link(file=Path(f"{name}.toml"), config=config)


def as_reward_model(link: Link, loss: SampleLoss | None = None) -> Link:
    changed = {"algorithm": link.config.algorithm.model_copy(update={"loss": loss or BradleyTerryLoss()})}
    return Link(file=link.file, config=link.config.model_copy(update=changed))


def with_reward(root: Path, source: str, **more: str) -> Link:
    return make_link(root, "ppo", "run:sft", reward={"function": "", "model": {"source": source, **more}})


def test_a_recipe_comes_after_those_whose_runs_it_begins_with(tmp_path: Path) -> None:
    sft = make_link(tmp_path, "sft")
    rm = as_reward_model(make_link(tmp_path, "rm", "run:sft"))
    check_order([sft, rm, with_reward(tmp_path, "run:rm"), make_link(tmp_path, "last", "run:ppo@best")])
    check_order([with_reward(tmp_path, "run:elsewhere")])
    prm = as_reward_model(make_link(tmp_path, "rm", "run:sft"), StepLabelsLoss())
    check_order([sft, prm, with_reward(tmp_path, "run:rm", kind="process")])
    distill: dict[str, Any] = {"preset": "on-policy-distill"}
    student = make_link(tmp_path, "student", algorithm=distill, reference={"source": "run:rm"})
    for links, text in (
        ([rm, sft], "rm.toml: model.source = 'run:sft': sft.toml makes it later"),
        ([make_link(tmp_path, "one", "run:one")], "one.toml: model.source = 'run:one': this recipe makes it itself"),
        ([sft, rm, sft], 'sft.toml: name = "sft" is that of sft.toml, too'),
        ([rm, make_link(tmp_path, "ppo", "run:rm")], "model.source = 'run:rm': rm.toml makes a reward model"),
        ([sft, rm, student], "student.toml: reference.source = 'run:rm': rm.toml makes a reward model"),
        ([sft, prm, with_reward(tmp_path, "run:rm")], 'makes a process reward model; set kind = "process" beside it'),
        ([sft, rm, with_reward(tmp_path, "run:rm", kind="process")], 'reward model of whole texts; set kind = "score"'),
        ([sft, with_reward(tmp_path, "run:sft")], "reward.reward.model.source = 'run:sft': sft.toml makes a language"),
    ):
        with pytest.raises(ConfigError) as caught:
            check_order(links)
        assert text in caught.value.message


def test_a_critic_reads_the_same_tokens_and_a_reward_model_may_not(tmp_path: Path) -> None:
    base, other = write_model(tmp_path / "base"), write_model(tmp_path / "other")
    link = make_link(
        tmp_path,
        "ppo",
        str(base),
        reward={"function": "", "model": {"source": "run:rm"}},
        algorithm={"preset": "ppo"},
        critic={"source": "run:rm"},
    )
    with runs.expect_runs() as expect:

        def warnings(source: Path) -> list[str]:
            expect("rm", runs.ExpectedRun(source=str(source), steps=3, export_every_steps=0))
            return check_run_sources(link.config)

        assert warnings(base) == []
        (other / "chat_template.jinja").write_text("{{ messages }}")
        (warning,) = warnings(other)
        assert warning.startswith("reward.reward.model.source = 'run:rm' has another tokenizer or chat template")
        (other / "tokenizer.json").write_text('{"other": 1}')
        with pytest.raises(ConfigError, match=r"critic.source = 'run:rm' has another tokenizer.json than model.source"):
            warnings(other)


def test_the_rows_of_later_recipes_are_read_with_the_template_that_an_earlier_one_sets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    base, template = str(write_model(tmp_path / "base")), tmp_path / "mine.jinja"
    template.write_text("{{ messages }}")
    with runs.expect_runs() as expect:
        expect("sft", runs.ExpectedRun(source=base, steps=3, export_every_steps=0, chat_template=str(template)))
        expect("rm", expected_run(make_link(tmp_path, "rm", "run:sft").config))
        for source in ("run:sft", "run:rm"):
            assert (model_folder.resolve(source) / "chat_template.jinja").read_text() == "{{ messages }}"
        assert not (model_folder.resolve(base) / "chat_template.jinja").exists()


def test_the_disk_of_a_chain_is_that_of_all_checkpoints_and_exports(tmp_path: Path) -> None:
    base = str(write_model(tmp_path / "base"))
    first = make_link(tmp_path, "sft", base, steps=6, checkpoint={"every_steps": 1, "keep": 2, "export_every_steps": 2})
    # Ten parameters: 12 bytes each in a checkpoint, of which the third is written before the first is deleted; 2 bytes
    # each in three exports.
    assert disk_bytes(first.config) == 3 * 120 + 3 * 20
    with runs.expect_runs() as expect:
        expect("sft", expected_run(first.config))
        second = make_link(tmp_path, "next", "run:sft")
        assert disk_bytes(second.config) > 0
        assert expected_run(second.config).source == base
        text = describe_chain([first, second])
    assert text.startswith("sft -> next: about 0.0 GiB of disk for all, ") and text.endswith(" GiB free.")


def test_a_plan_of_several_recipes_needs_no_run_that_they_make(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    words = ["--skip-checks", "--set", "steps=3"]
    assert cli_main.main(["plan", *LADDER, *words]) == 0
    out = capsys.readouterr().out
    assert out.index("ladder-sft: 3 steps of sft on builtin:") < out.index(
        "ladder-ppo: 3 steps of ppo on run:ladder-sft"
    )
    assert out.splitlines()[-1].startswith("ladder-sft -> ladder-rm -> ladder-ppo: about ")
    assert cli_main.main(["plan", *LADDER, "--set", "sampling.max_new_tokens=9"]) == 1
    assert capsys.readouterr().err.rstrip().endswith(f" each of the 3 recipes, and this is an error of {LADDER[0]}")
    assert cli_main.main(["plan", *LADDER, "--resolved"]) == 1
    assert "--resolved prints one recipe, and 3 are given" in capsys.readouterr().err
    longer = ["--set", "model.max_context_tokens=9000", "--set", "batch.tokens_per_micro_batch=9000"]
    assert cli_main.main(["plan", *LADDER, *words, *longer]) == 1
    assert capsys.readouterr().err.startswith(f"fourfold: {LADDER[0]}: model.max_context_tokens = 9000, but ")
