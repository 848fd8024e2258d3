"""Mixtures of sources: exact shares, no repetition before a source is exhausted, an order of positions alone."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fourfold import config as configuration
from fourfold.config import block_counts
from fourfold.config.sources import MIXTURE_BLOCK
from fourfold.errors import ConfigError
from fourfold_coordinator.data.curriculum import Curriculum, ScoredAttempt
from fourfold_coordinator.data.load_prompts import load_prompts
from fourfold_coordinator.data.prompts import MixtureOrder, PromptSet
from fourfold_coordinator.rewards.scoring import scorer_names
from tests.fakes.toy import make_config
from tests.unit.coordinator.test_prompts import Letters, a_prompt, write_jsonl

WEIGHTS = st.lists(st.floats(0.01, 100), min_size=1, max_size=6).filter(lambda found: min(block_counts(found)) > 0)


@pytest.fixture
def load(tmp_path: Path) -> Callable[..., PromptSet]:
    def load(*train: dict[str, Any], **data: Any) -> PromptSet:
        table = {"train": list(train), "holdout": None, "chat": False, **data}
        return load_prompts(make_config(tmp_path, data=table), Letters())

    return load


@pytest.fixture
def files(tmp_path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Two files with other columns."""
    easy = [{"question": f"easy {n}", "answer": n} for n in range(6)]
    hard = [{"problem": f"hard {n}", "solution": n, "level": n % 2} for n in range(4)]
    return (
        {"path": str(write_jsonl(tmp_path / "easy.jsonl", easy))},
        {
            "path": str(write_jsonl(tmp_path / "b.jsonl", hard)),
            "name": "hard",
            "prompt_field": "problem",
            "answer_field": "solution",
        },
    )


@given(weights=WEIGHTS)
def test_a_block_has_the_share_of_each_source_to_less_than_one_position(weights: list[float]) -> None:
    counts = block_counts(weights)
    assert sum(counts) == MIXTURE_BLOCK
    assert all(abs(n - w / sum(weights) * MIXTURE_BLOCK) < 1 for n, w in zip(counts, weights, strict=True))


@settings(max_examples=25)
@given(weights=WEIGHTS, seed=st.integers(0, 2**31 - 1), block=st.integers(0, 10**9), data=st.data())
def test_every_block_has_exact_shares_and_each_position_stands_alone(
    weights: list[float], seed: int, block: int, data: st.DataObject
) -> None:
    sizes = data.draw(st.lists(st.integers(1, 40), min_size=len(weights), max_size=len(weights)))
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    sources = [range(start, start + size) for start, size in zip(starts, sizes, strict=True)]
    order = MixtureOrder(sources, weights, seed=seed)
    rows = [order.at(block * MIXTURE_BLOCK + offset) for offset in range(MIXTURE_BLOCK)]
    counted = Counter(next(i for i, source in enumerate(sources) if row in source) for row in rows)
    assert [counted[i] for i in range(len(weights))] == block_counts(weights)
    offset = data.draw(st.integers(0, MIXTURE_BLOCK - 1))
    assert MixtureOrder(sources, weights, seed=seed).at(block * MIXTURE_BLOCK + offset) == rows[offset]


def test_no_row_is_repeated_before_its_source_is_exhausted() -> None:
    sources = [range(700), range(700, 1000)]
    order = MixtureOrder(sources, [3.0, 1.0], seed=5)
    drawn: tuple[list[int], list[int]] = ([], [])
    for position in range(3 * MIXTURE_BLOCK):
        row = order.at(position)
        drawn[row in sources[1]].append(row)
    for rows, source in zip(drawn, sources, strict=True):
        passes = [rows[i : i + len(source)] for i in range(0, len(rows) - len(source) + 1, len(source))]
        assert len(passes) > 1 and all(sorted(one) == list(source) for one in passes)
        assert passes[0] != passes[1], "every pass has an order of its own"


def test_blocks_and_seeds_are_shuffled_differently() -> None:
    def kinds(seed: int, block: int) -> tuple[int, ...]:
        order = MixtureOrder([[0], [1]], [1, 1], seed=seed)
        return tuple(order.at(block * MIXTURE_BLOCK + offset) for offset in range(64))

    assert len({kinds(seed, block) for seed in (0, 1) for block in (0, 1, 2)}) == 6


def test_rows_of_several_files_form_one_pool(load: Callable[..., PromptSet], files: Sequence[dict[str, Any]]) -> None:
    prompts = load(*files)
    assert [p.index for p in prompts.train] == list(range(10)), "an index names one row of all files"
    assert [p.source for p in prompts.train] == ["easy"] * 6 + ["hard"] * 4
    assert [p.text for p in prompts.train][5:7] == ["easy 5", "hard 0"]
    assert [p.answer for p in prompts.train][5:7] == ["5", "0"]
    assert json.loads(prompts.train[6].metadata_json) == {"level": 0, "data_source": "hard", "answer_value": 0}
    assert sorted(prompts.at(i).index for i in range(10)) == list(range(10))


def test_a_single_source_without_a_name_adds_nothing(
    load: Callable[..., PromptSet], files: Sequence[dict[str, Any]]
) -> None:
    assert json.loads(load(files[0]).train[0].metadata_json) == {"answer_value": 0}
    assert json.loads(load({**files[0], "name": "x"}).train[0].metadata_json) == {"data_source": "x", "answer_value": 0}
    rows = write_jsonl(Path(files[0]["path"]).with_name("own.jsonl"), [{"question": "q", "data_source": "mine"}])
    own = load({"path": str(rows), "name": "x"}).train[0]
    assert json.loads(own.metadata_json) == {"data_source": "mine"} and own.source == "x"


def test_a_scorer_is_chosen_by_the_source(load: Callable[..., PromptSet], files: Sequence[dict[str, Any]]) -> None:
    tables = [configuration.RewardConfig(name=name, where={"data_source": (name,)}) for name in ("easy", "hard")]
    chosen = [scorer_names(tables, prompt, "") for prompt in load(*files).train]
    assert chosen == [("easy",)] * 6 + [("hard",)] * 4


def test_weighted_files_are_mixed_and_the_digest_knows_the_weights(
    load: Callable[..., PromptSet], files: Sequence[dict[str, Any]]
) -> None:
    def mixed(easy: float, hard: float) -> PromptSet:
        return load({**files[0], "weight": easy}, {**files[1], "weight": hard})

    prompts = mixed(0.75, 0.25)
    drawn = Counter(prompts.at(position).source for position in range(2 * MIXTURE_BLOCK))
    assert drawn == {"easy": 1536, "hard": 512}
    assert prompts.digest() == mixed(3, 1).digest() != mixed(1, 1).digest()
    assert len({p.digest() for p in (prompts, load(*files), load(*files, order="file"))}) == 3


def test_in_the_order_of_the_files_each_source_goes_on_where_it_was(
    load: Callable[..., PromptSet], files: Sequence[dict[str, Any]]
) -> None:
    plain = load(*files, order="file")
    assert [plain.at(i).index for i in range(12)] == [*range(10), 0, 1]
    prompts = load({**files[0], "weight": 1.0}, {**files[1], "weight": 1.0}, order="file")
    drawn = [prompts.at(position) for position in range(MIXTURE_BLOCK)]
    assert [p.index for p in drawn if p.source == "easy"][:13] == [*range(6), *range(6), 0]


def test_the_holdout_is_drawn_from_all_sources_and_must_leave_some_of_each(
    load: Callable[..., PromptSet], files: Sequence[dict[str, Any]], tmp_path: Path
) -> None:
    prompts = load(*files, holdout={"field": "", "groups": 5})
    assert {p.source for p in prompts.held_out_prompts} == {"easy", "hard"}
    assert not {p.index for p in prompts.held_out_prompts} & {p.index for p in prompts.train}
    one = {"path": str(write_jsonl(tmp_path / "one.jsonl", [{"question": "only"}])), "weight": 1.0}
    with pytest.raises(ConfigError, match="the holdout leaves no training prompt of 'one'"):
        for seed in range(20):
            table = {"train": [{**files[0], "weight": 1.0}, one], "holdout": {"field": "", "groups": 5}}
            load_prompts(make_config(tmp_path, data=table, seed=seed), Letters())


def test_prompts_above_the_limit_are_left_out_and_counted(
    load: Callable[..., PromptSet], files: Sequence[dict[str, Any]], caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    rows = write_jsonl(tmp_path / "lengths.jsonl", [{"question": "x" * n} for n in (3, 4, 5, 6, 7, 80)])
    with caplog.at_level(logging.WARNING):
        prompts = load({"path": str(rows)}, max_prompt_tokens=7)  # one token begins a text
    assert [p.index for p in prompts.train] == [0, 1, 2, 3] and prompts.left_out == 1
    assert "dropped 1 of 6 prompts that have more than data.max_prompt_tokens = 7 tokens; rows 4" in caplog.text
    assert "dropped 1 of 6 prompts that leave no room" in caplog.text
    with pytest.raises(ConfigError, match=r"5 of 6 have more than data.max_prompt_tokens = 2 tokens"):
        load({"path": str(rows)}, max_prompt_tokens=2)
    held_out = load(files[0], eval={"path": str(rows)}, max_prompt_tokens=7).held_out_prompts
    assert len(held_out) == 5, "the limits are of training prompts"


def test_a_template_makes_the_prompt_from_columns(load: Callable[..., PromptSet], tmp_path: Path) -> None:
    rows = [{"context": "c", "n": 2, "list": ["\u00e9"], "none": None, "answer": "a"}]
    path = str(write_jsonl(tmp_path / "t.jsonl", rows))
    template = "{{{context}}} {n}, {list}{none}\nQuestion: {context}"
    (prompt,) = load({"path": path, "template": template}).train
    assert prompt.text == '{c} 2, ["\u00e9"]\nQuestion: c'
    assert json.loads(prompt.metadata_json)["context"] == "c", "scorers may need the columns"
    with pytest.raises(ConfigError, match=r"row 0: no column 'contxt', which template = .* names; it has answer, con"):
        load({"path": path, "template": "{contxt}"})


@pytest.mark.parametrize("template", ["{a.b}", "{a[0]}", "{a!r}", "{a:>9}", "{}", "{a", "a}", "{ {b} }", "no column"])
def test_a_template_computes_nothing(tmp_path: Path, template: str) -> None:
    with pytest.raises(ValueError, match=r"template = .*(COLUMN|add one)"):
        make_config(tmp_path, data={"train": {"path": "x.jsonl", "template": template}})


@pytest.mark.parametrize(
    ("train", "words"),
    [
        (
            [{"path": "a/x.jsonl"}, {"path": "b/x.jsonl"}],
            "two sources have the name 'x'; give each a `name` of its own",
        ),
        ([{"path": "a", "weight": 1.0}, {"path": "b"}], "`weight` is set for 1 of 2 sources, and not for 'b'"),
        ([{"path": "a", "weight": 1e-4}, {"path": "b", "weight": 1.0}], "weight = 0.0001 of 'a' is 0.0001 of all"),
        ([{"path": "a", "weight": 0.0}], "greater than 0"),
        ([{"path": "a", "name": "x y"}], "match pattern"),
        ([{"path": "a", "template": "{x}", "prompt_field": "y"}], "template makes the prompt from columns"),
        ([{"reasoning_gym": "products", "size": 3, "split": "test"}], "split and config choose a part of a data set"),
    ],
)
def test_mistakes_of_sources_are_named(tmp_path: Path, train: list[dict[str, Any]], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make_config(tmp_path, data={"train": train})


RECIPE = """
name = "x"
steps = 1
[model]
source = "m"
[batch]
prompts_per_step = 1
group_size = 2
[sampling]
max_new_tokens = 8
"""


def test_one_table_and_a_list_of_tables_are_read_set_and_written(tmp_path: Path) -> None:
    path = tmp_path / "r.toml"
    path.write_text(RECIPE + '[data.train]\npath = "a.jsonl"\n')
    one = configuration.load(path, ["data.train.path=b.jsonl", "data.train.size=3"])
    assert [(s.path, s.size) for s in one.data.train] == [("b.jsonl", 3)]
    path.write_text(
        RECIPE + '[[data.train]]\npath = "a.jsonl"\nweight = 3\n[[data.train]]\npath = "b.jsonl"\nweight = 1\n'
    )
    two = configuration.load(path, ["data.train.1.weight=2"])
    assert [s.weight for s in two.data.train] == [3, 2]
    for config in (one, two):
        path.write_text(configuration.dump(config))
        assert configuration.load(path) == config
    path.write_text(RECIPE + '[[data.train]]\npath = "a.jsonl"\n[[data.train]]\npath = "b.jsonl"\nwieght = 1\n')
    with pytest.raises(ConfigError, match=r"r.toml:15  \[\[data.train\]\] number 2 wieght: no such key. .* `weight`"):
        configuration.load(path)


def test_the_curriculum_knows_the_prompts_of_all_sources(tmp_path: Path) -> None:
    prompts = [a_prompt(i, "a" if i < 3 else "b") for i in range(6)]
    mixed = PromptSet(train=prompts, held_out=[], seed=1, weights={"a": 1.0, "b": 1.0})
    config = configuration.CurriculumConfig()
    curriculum = Curriculum(config, seed=1, prompt_at=lambda position: mixed.at(position).index)
    solved = next(p for p in range(20) if mixed.at(p).source == "b")
    curriculum.add_step([ScoredAttempt(f"p{solved:07d}-0", 1.0, "")] * 4)
    assert [i for i in range(6) if curriculum.weight(i) < 1] == [mixed.at(solved).index]


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ({"path": "a/My rows.v2.jsonl"}, "My-rows-v2"),
        ({"path": "hf:openai/gsm8k-1.5@main"}, "gsm8k-1-5"),
        ({"reasoning_gym": "chain_sum", "size": 1}, "chain_sum"),
        ({"path": "???"}, "data"),
    ],
)
def test_a_source_without_a_name_has_that_of_its_rows(source: dict[str, Any], name: str) -> None:
    assert configuration.TrainSourceConfig(**source).title == name
