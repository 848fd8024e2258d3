"""The overrides of vLLM's private code: each is in the table of their README, and its switch exists."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any, cast, get_args

import pytest

import fourfold_rollout
from fourfold import config
from fourfold.config.rollout import RolloutConfig
from fourfold_rollout.serve import engine_settings

ROOT = Path(__file__).parents[3]
FOLDER = Path(fourfold_rollout.__file__).parent / "vllm" / "patches"


def rows() -> dict[str, list[str]]:
    """Return the cells of the README's table by module."""
    lines = [line for line in (FOLDER / "README.md").read_text().splitlines() if line.startswith("| `")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {row[0].strip("`"): row for row in cells}


def test_each_patch_has_a_complete_row() -> None:
    table = rows()
    assert set(table) == {path.name for path in FOLDER.glob("*.py")} - {"__init__.py"}
    for _, symbol, versions, gain, switch in table.values():
        assert "`" in symbol and re.match(r"0\.\d+", versions) and gain and switch
        for link in re.findall(r"\]\((.*?)\)", gain):
            assert (FOLDER / link).resolve().is_file(), link


def test_the_switches_of_the_table_are_those_of_the_recipe() -> None:
    (choice,) = get_args(RolloutConfig.model_fields["disabled_vllm_patches"].annotation)
    named = {name for row in rows().values() for name in re.findall(r"`(\w+)`", row[-1])}
    assert named == set(get_args(choice))


def test_a_recipe_switches_patches_off() -> None:
    recipe = config.load(ROOT / "recipes" / "quickstart.toml")
    assert engine_settings(recipe, recipe.rollout_pools[0], Path("/model")).disabled_patches == frozenset()
    rollout = recipe.rollout.model_copy(update={"disabled_vllm_patches": ["seeds", "scheduler"]})
    changed = recipe.model_copy(update={"rollout": rollout})
    settings = engine_settings(changed, changed.rollout_pools[0], Path("/model"))
    assert settings.disabled_patches == {"seeds", "scheduler"}
    with pytest.raises(ValueError, match="disabled_vllm_patches"):
        RolloutConfig(disabled_vllm_patches=["sampler"])  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("disabled", "asked"), [(set(), [True]), ({"seeds"}, [False]), ({"logprobs"}, [])], ids=["all", "seeds", "logprobs"]
)
async def test_workers_are_asked_for_the_patches_that_are_on(
    disabled: set[str], asked: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    from fourfold_rollout.vllm.engine import VllmEngine

    seen = []

    async def call(method: str, *args: Any, timeout: float) -> list[str]:
        seen.append(args[-1])
        return [""]

    recipe = config.load(ROOT / "recipes" / "quickstart.toml")
    engine = VllmEngine.__new__(VllmEngine)
    engine._settings = replace(
        engine_settings(recipe, recipe.rollout_pools[0], Path("/model")), disabled_patches=frozenset(disabled)
    )
    monkeypatch.setattr(engine, "_call", call)
    table = await engine._open_logprobs()
    assert seen == asked and (table is None) == (not asked)
    if table is not None:
        table.close()


@pytest.mark.parametrize(
    ("disabled", "recompute", "asked"),
    [(set(), False, [False]), (set(), True, [True]), ({"scheduler"}, False, []), ({"scheduler"}, True, [True])],
)
async def test_prefixes_of_running_samples_are_forgotten_only_with_the_patch(
    disabled: set[str], recompute: bool, asked: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    from fourfold_rollout.vllm.engine import VllmEngine

    seen = []

    class Llm:
        async def reset_prefix_cache(self, reset_running_requests: bool, reset_connector: bool) -> None:
            seen.append(reset_running_requests)

    async def unless_dead(work: Any, timeout: float) -> None:
        await work

    recipe = config.load(ROOT / "recipes" / "quickstart.toml")
    engine = VllmEngine.__new__(VllmEngine)
    engine._settings = replace(
        engine_settings(recipe, recipe.rollout_pools[0], Path("/model")), disabled_patches=frozenset(disabled)
    )
    engine._llm = cast(Any, Llm())
    monkeypatch.setattr(engine, "_unless_dead", unless_dead)
    await engine.forget_prefixes(recompute=recompute)
    assert seen == asked
