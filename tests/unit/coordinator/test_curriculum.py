"""The curriculum: weights by success rate, skips that any process repeats, scores that a resumed run reads again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fourfold.config import CurriculumConfig, DataConfig
from fourfold_coordinator.data.curriculum import Curriculum, ScoredAttempt

PROMPTS = 5


def make(*, seed: int = 3, success: float = 1.0) -> Curriculum:
    """A data set of 5 prompts whose order is always 0, 1, 2, 3, 4."""
    config = CurriculumConfig(success=success)
    return Curriculum(config, seed=seed, prompt_at=lambda position: position % PROMPTS)


def group(position: int, *scores: float | None, try_: int = 0, dropped: str = "") -> list[ScoredAttempt]:
    return [ScoredAttempt(f"p{position:07d}-{try_}", score, dropped) for score in scores]


@pytest.mark.parametrize(
    ("scores", "weight"),
    [
        ((1.0, 1.0, 1.0, 1.0), 0.1),
        ((0.0, 0.0, 0.0, 0.0), 0.1),
        ((1.0, 0.0, 2.0, 0.5), 1.0),
        ((0.0, 0.0, 0.0, 1.0), 0.1 + 0.9 * 4 * 0.25 * 0.75),
    ],
)
def test_a_prompt_is_drawn_less_the_surer_its_outcome_is(scores: tuple[float, ...], weight: float) -> None:
    curriculum = make()
    assert curriculum.weight(1) == 1.0, "no score yet"
    curriculum.add_step(group(1, *scores))
    assert curriculum.weight(1) == pytest.approx(weight) and curriculum.weight(2) == 1.0


def test_only_the_latest_groups_count_over_all_passes() -> None:
    curriculum = make()
    for number, scores in enumerate([(1.0, 1.0), (0.0, 0.0), (0.0, 0.0, 0.0)]):
        curriculum.add_step(group(1 + number * PROMPTS, *scores))
    assert curriculum.weight(1) == 0.1
    curriculum.add_step(group(16, 1.0, 0.0))
    assert curriculum.weight(1) == pytest.approx(0.1 + 0.9 * 4 * 0.2 * 0.8), "1 success in 5 attempts"


def test_filtered_attempts_count_and_those_without_an_outcome_do_not() -> None:
    curriculum = make()
    curriculum.add_step(group(0, 1.0, 1.0, dropped="FILTERED"))
    assert curriculum.weight(0) == 0.1
    for reason in ("STALE", "BASELINE", "WORKER_DIED"):
        curriculum.add_step(group(1, 1.0, 1.0, dropped=reason))
    curriculum.add_step(group(1, None, None))
    assert curriculum.weight(1) == 1.0
    curriculum.add_step([*group(2, 1.0, None), *group(2, 0.0, try_=1)])
    assert curriculum.weight(2) == 1.0, "a prompt that was issued twice has two groups"


def test_the_order_of_attempts_within_a_step_changes_nothing() -> None:
    attempts = [*group(0, 1.0, 1.0), *group(5, 0.0, 1.0), *group(10, 0.0, 0.0)]
    one, other = make(), make()
    one.add_step(attempts)
    other.add_step(attempts[::-1])
    assert one.weight(0) == other.weight(0) == pytest.approx(0.1 + 0.9 * 4 * 0.25 * 0.75)


def test_draws_follow_the_weights_and_are_the_same_in_every_process() -> None:
    curriculum, again = make(), make()
    for one in (curriculum, again):
        one.add_step([*group(0, 1.0, 1.0), *group(1, 1.0, 0.0)])
    drawn = [position for position in range(20_000) if curriculum.accepts(position)]
    assert drawn == [position for position in range(20_000) if again.accepts(position)]
    shares = [sum(p % PROMPTS == prompt for p in drawn) / 4000 for prompt in range(PROMPTS)]
    assert shares[0] == pytest.approx(0.1, abs=0.02) and shares[1:] == [1.0] * 4
    other = make(seed=4)
    other.add_step(group(0, 1.0, 1.0))
    assert [p for p in range(0, 500, 5) if other.accepts(p)] != [p for p in range(0, 500, 5) if curriculum.accepts(p)]


def test_scores_are_read_again_from_the_samples_of_the_run(tmp_path: Path) -> None:
    path, live = tmp_path / "samples.jsonl", make()
    steps = [
        [*group(0, 1.0, 0.0), *group(1, 0.0, 0.0, dropped="FILTERED")],
        [*group(5, 1.0, 1.0), *group(2, 0.5, None), *group(7, 3.0)],
    ]
    with path.open("w") as lines:
        for number, attempts in enumerate(steps, 1):
            live.add_step(attempts)
            for attempt in attempts:
                lines.write(json.dumps({"step": number, "completion": 'a "score"', **attempt._asdict()}) + "\n")
    restored = make()
    restored.add_step(group(3, 1.0))  # of a step that was lost
    restored.restore(path)
    assert [restored.weight(i) for i in range(PROMPTS)] == [live.weight(i) for i in range(PROMPTS)]
    assert restored.weight(3) == 1.0
    restored.restore(tmp_path / "none.jsonl")
    assert {restored.weight(i) for i in range(PROMPTS)} == {1.0}


def test_a_recipe_without_training_data_has_no_curriculum() -> None:
    with pytest.raises(ValueError, match="`curriculum` skips prompts of `train`"):
        DataConfig(curriculum=CurriculumConfig())
