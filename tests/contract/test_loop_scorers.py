"""A run with several scorers, which are replaced while it goes on, with the real coordinator and loop."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from fourfold.coordinator.client import AsyncScorerClient
from fourfold.coordinator.v1 import scorer_service_pb2 as pb
from fourfold.errors import InvalidInput, NotFound, Unavailable, WrongState
from fourfold.reward.v1 import reward_service_pb2 as reward
from fourfold_coordinator.rewards import scorers
from fourfold_coordinator.routing import router
from tests.fakes.stage import Stage, until
from tests.fakes.toy_scorers import FakeReward

Outcome = Callable[[reward.ScoreItem], reward.SampleScore | None]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router, "_TICK_SECONDS", 0.02)
    monkeypatch.setattr(scorers, "_ANSWER_SECONDS", 2.0)


def constant(value: float) -> Outcome:
    return lambda item: reward.SampleScore(score=value)


def by_length(item: reward.ScoreItem) -> reward.SampleScore:
    return reward.SampleScore(score=len(item.completion_text) + 0.5 * (item.completion_text == item.answer))


@pytest.fixture
async def scorer() -> AsyncIterator[Callable[..., Any]]:
    """Return a function that starts a reward service which registers nowhere."""
    started: list[FakeReward] = []

    async def start(stage: Stage, name: str, outcome: Outcome = lambda item: None) -> FakeReward:
        service = FakeReward(f"other-{len(started)}", stage.config)
        service.name, service.outcome = name, outcome
        await service.start()
        started.append(service)
        return service

    yield start
    for service in started:
        await service.kill()


def client_of(stage: Stage) -> AsyncScorerClient:
    return AsyncScorerClient(stage.address, timeout=10)


def scorers_by_step(stage: Stage) -> dict[int, dict[str, set[str]]]:
    """Return name@version of each term of the trained samples, by step."""
    found: dict[int, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for line in stage.lines("samples.jsonl"):
        if not line["dropped"]:
            for name, (_, _, scorer) in line["terms"].items():
                found[line["step"]][name].add(scorer)
    return {step: dict(names) for step, names in found.items()}


class Hold:
    """Lets the trainer begin a step only when the test says so."""

    def __init__(self, stage: Stage, step: int) -> None:
        self.reached, self.go = asyncio.Event(), asyncio.Event()

        async def wait(trained: int) -> None:
            if trained == step:
                self.reached.set()
                await self.go.wait()

        stage.trainer.on_train = wait


async def start_and_hold(stage: Stage, step: int) -> Hold:
    """Start the run, and return when the trainer is about to begin a step."""
    hold = Hold(stage, step)
    await stage.start()
    await asyncio.wait_for(hold.reached.wait(), 10)
    return hold


async def test_scores_of_several_scorers_are_added_by_weight(make_stage: Callable[..., Stage], scorer: Any) -> None:
    stage: Stage = make_stage(steps=2)
    other = await scorer(stage, "length@3", by_length)
    stage = make_stage(steps=2, reward=[{"name": "right"}, {"name": "long", "target": other.target, "weight": 0.25}])
    await stage.complete()
    for line in stage.lines("samples.jsonl"):
        right, long = line["terms"]["right"], line["terms"]["long"]
        assert right == [float(line["completion"] == line["answer"]), 1.0, "toy@1"]
        assert long == [len(line["completion"]) + 0.5 * right[0], 0.25, "length@3"]
        assert line["score"] == pytest.approx(right[0] + 0.25 * long[0])
        assert line["scorer"] == "toy@1 + length@3"
    row = stage.lines("metrics.jsonl")[-1]
    assert row["scorers"] == {"right": {"toy@1": 12}, "long": {"length@3": 12}}
    assert row["scorers/right/mean"] + 0.25 * row["scorers/long/mean"] == pytest.approx(row["reward/mean"])
    (entry,) = stage.report()["scorers"]["steps"]
    assert entry == {"first": 1, "last": 2, "scorers": {"right": {"toy@1": 24}, "long": {"length@3": 24}}}


async def test_a_gate_that_fails_keeps_the_other_scorers_out(make_stage: Callable[..., Stage], scorer: Any) -> None:
    stage: Stage = make_stage(steps=2)
    other = await scorer(stage, "judge@1", constant(5.0))
    tables = [{"name": "judge", "target": other.target}, {"name": "right", "gate": 1.0, "weight": 0.5}]
    stage = make_stage(steps=2, reward=tables)
    asked: list[bool] = []
    judge: Outcome = other.outcome

    def note(item: reward.ScoreItem) -> reward.SampleScore | None:
        asked.append(item.completion_text == item.answer)
        return judge(item)

    other.outcome = note
    await stage.complete()
    assert asked and all(asked), "the judge saw only what passed the gate"
    scores = {line["completion"] == line["answer"]: line["score"] for line in stage.lines("samples.jsonl")}
    assert scores == {True: 5.5, False: 0.0}


async def test_a_scorer_that_abstains_drops_the_sample_or_is_left_out(
    make_stage: Callable[..., Stage], scorer: Any
) -> None:
    def odd(item: reward.ScoreItem) -> reward.SampleScore:
        if item.experience.sample_id.endswith("-1"):
            return reward.SampleScore(abstain_reason="NO_IDEA")
        return reward.SampleScore(score=2.0)

    stage: Stage = make_stage(steps=1)
    other = await scorer(stage, "odd@1", odd)
    for abstain, dropped in (("drop", {"ODD_NO_IDEA": 3}), ("omit", {})):
        tables = [{"name": "right"}, {"name": "odd", "target": other.target, "abstain": abstain}]
        stage = make_stage(steps=1, reward=tables)
        await stage.complete()
        assert stage.report()["dropped"] == dropped
        lines = {line["sample_id"][-1]: line for line in stage.lines("samples.jsonl") if not line["dropped"]}
        assert ("1" in lines) is (abstain == "omit")
        if abstain == "omit":
            assert list(lines["1"]["terms"]) == ["right"]


async def test_a_run_that_ends_for_one_of_several_scorers_names_its_first_error(
    make_stage: Callable[..., Stage], capsys: pytest.CaptureFixture[str]
) -> None:
    def raises(item: reward.ScoreItem) -> reward.SampleScore | None:
        if item.experience.sample_id.startswith("eval"):
            return None
        return reward.SampleScore(error=reward.SampleError(code=2, reason="RAISED", message="KeyError: 'answer'"))

    tables = [{"name": "right"}, {"name": "right-format", "function": "mine.py:score"}]
    stage: Stage = make_stage(reward=[{**table, "lost_rounds": 1, "on_error": "drop"} for table in tables])
    other = FakeReward("reward-right-format-0", stage.config)
    other.scorer, other.outcome = "right-format", raises
    stage.others.append(other)
    await stage.start()
    assert await stage.finish() == 1
    last = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("{")][-1]
    assert "RIGHT_FORMAT_RAISED; the first RAISED came from reward-right-format-0: " in last and "KeyError" in last
    assert last.endswith("; correct `mine.py:score`")


async def test_rows_choose_their_scorers(make_stage: Callable[..., Stage], scorer: Any) -> None:
    stage: Stage = make_stage(steps=2)
    other = await scorer(stage, "other@1", constant(0.5))
    numbers = {line["expression"].split(" * ")[0] for line in _rows(stage)}
    low = sorted(numbers)[: len(numbers) // 2]
    field = "first"
    _rewrite(stage, lambda row: row | {field: row["expression"].split(" * ")[0]})
    tables = [
        {"name": "one", "where": {field: low}},
        {"name": "two", "target": other.target, "where": {field: sorted(numbers - set(low))}},
    ]
    stage = make_stage(steps=3, reward=tables, data=stage.config.data.model_dump(exclude_none=True))
    await stage.complete()
    used = {
        (tuple(line["terms"]), line["prompt"].split("* ")[0].split()[-1] in low)
        for line in stage.lines("samples.jsonl")
    }
    assert used == {(("one",), True), (("two",), False)}


async def test_rows_may_name_their_scorers_and_a_row_without_one_is_refused(
    make_stage: Callable[..., Stage], scorer: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    stage: Stage = make_stage(steps=2)
    other = await scorer(stage, "other@1", constant(0.5))
    _rewrite(stage, lambda row: row | {"by": "two" if row["expression"].startswith("3") else ["one", "two"]})
    data = stage.config.data.model_dump(exclude_none=True) | {"scorers_field": "by"}
    tables = [{"name": "one"}, {"name": "two", "target": other.target}]
    stage = make_stage(steps=2, reward=tables, data=data)
    await stage.complete()
    used = {(tuple(line["terms"]), "3 * " in line["prompt"]) for line in stage.lines("samples.jsonl")}
    assert used <= {(("two",), True), (("one", "two"), False), (("one", "two"), True)} and len(used) >= 2
    _rewrite(stage, lambda row: row | {"by": "three"})
    stage = make_stage(steps=2, reward=tables, data=data)
    await stage.start(join=False)
    assert await stage.finish() == 1
    assert "of the data has no scorer: " in capsys.readouterr().err


def _rows(stage: Stage) -> list[dict[str, Any]]:
    import json
    from pathlib import Path

    return [json.loads(line) for line in Path(stage.config.data.train[0].path).read_text().splitlines()]


def _rewrite(stage: Stage, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    import json
    from pathlib import Path

    rows = [change(row) for row in _rows(stage)]
    Path(stage.config.data.train[0].path).write_text("".join(json.dumps(row) + "\n" for row in rows))


async def test_a_swap_counts_for_every_sample_that_no_step_has_and_lost_ones_have_a_reason(
    make_stage: Callable[..., Stage], scorer: Any
) -> None:
    def most(item: reward.ScoreItem) -> reward.SampleScore:
        if item.experience.sample_id.endswith("-2"):
            return reward.SampleScore(abstain_reason="TOO_HARD")
        return reward.SampleScore(score=1.0)

    stage: Stage = make_stage(steps=4, asynchrony={"max_policy_lag": 1})
    hold = await start_and_hold(stage, 2)
    other = await scorer(stage, "most@2", most)
    async with client_of(stage) as client:
        await until(lambda: len(_ready(stage)) > 0)
        changed = await client.swap("reward", [other.target])
        assert list(changed.live.scorers) == ["most@2"] and list(changed.previous.scorers) == ["toy@1"]
    hold.go.set()
    await stage.check_end()
    by_step = scorers_by_step(stage)
    assert by_step[1] == by_step[2] == {"reward": {"toy@1"}}
    assert by_step[3] == by_step[4] == {"reward": {"most@2"}}, "the groups that waited were scored again"
    (change,) = stage.report()["scorers"]["changes"]
    assert (change["scorer"], change["change"], change["services"]) == ("reward", "swap", f"most@2 at {other.target}")
    assert stage.report()["dropped"] == {"TOO_HARD": 6}, "one of each group of steps 3 and 4"
    dropped = {line["sample_id"] for line in stage.lines("samples.jsonl") if line["dropped"] == "TOO_HARD"}
    assert len(dropped) == 6 and all(name.endswith("-2") for name in dropped)
    assert sum(row["samples/dropped"] for row in stage.lines("metrics.jsonl")) == 6


async def test_groups_that_the_new_scorer_cannot_score_at_all_are_lost_and_replaced(
    make_stage: Callable[..., Stage], scorer: Any
) -> None:
    stage: Stage = make_stage(steps=4, asynchrony={"max_policy_lag": 1})
    hold = await start_and_hold(stage, 2)
    taken: set[str] = set()

    def later(item: reward.ScoreItem) -> reward.SampleScore:
        if item.experience.group_id in taken:
            return reward.SampleScore(abstain_reason="OLD_GROUP")
        return reward.SampleScore(score=1.0)

    other = await scorer(stage, "later@2", later)
    async with client_of(stage) as client:
        await until(lambda: len(_ready(stage)) >= 24)
        taken |= {row.group_id for row in _ready(stage)}
        await client.swap("reward", [other.target])
    hold.go.set()
    await stage.check_end()
    assert set(stage.report()["dropped"]) == {"GROUP_TOO_SMALL"}
    assert all(names == {"reward": {"later@2"}} for step, names in scorers_by_step(stage).items() if step > 2)


async def test_groups_are_scored_again_on_request(make_stage: Callable[..., Stage]) -> None:
    stage: Stage = make_stage(steps=4, asynchrony={"max_policy_lag": 1})
    hold = await start_and_hold(stage, 2)
    async with client_of(stage) as client:
        await until(lambda: len(_ready(stage)) > 0)
        stage.reward.outcome = constant(9.0)  # mended, under the same name
        await client.rescore("reward")
    hold.go.set()
    await stage.check_end()
    scores = {line["step"]: line["score"] for line in stage.lines("samples.jsonl")}
    assert scores[1] != 9 and scores[2] != 9 and scores[3] == scores[4] == 9


def _ready(stage: Stage) -> list[Any]:
    ledger = stage.ledger()
    try:
        return ledger.recorded()
    finally:
        ledger.close()


async def test_a_hanging_scorer_is_swapped_without_a_lost_sample(make_stage: Callable[..., Stage], scorer: Any) -> None:
    stage: Stage = make_stage(steps=2)
    hangs = asyncio.Event()

    async def hang() -> None:
        if stage.reward.calls > 8:
            hangs.set()
            await asyncio.sleep(60)

    stage.reward.on_score = hang
    await stage.start()
    await asyncio.wait_for(hangs.wait(), 10)
    other = await scorer(stage, "mended@2")
    async with client_of(stage) as client:
        await client.swap("reward", [other.target])
    await stage.check_end()
    assert stage.report()["dropped"] == {}
    assert all(len(names["reward"]) == 1 for names in scorers_by_step(stage).values())


async def test_a_canary_gets_whole_groups_and_is_promoted(make_stage: Callable[..., Stage], scorer: Any) -> None:
    stage: Stage = make_stage(steps=4, batch={"prompts_per_step": 16})
    hold = await start_and_hold(stage, 1)
    other = await scorer(stage, "new@2")
    async with client_of(stage) as client:
        changed = await client.canary("reward", [other.target], share=0.25)
        assert (changed.canary_share, list(changed.canary.scorers)) == (0.25, ["new@2"])
        with pytest.raises(WrongState, match="has a canary already"):
            await client.canary("reward", [other.target], share=0.5)
        third = Hold(stage, 3)
        hold.go.set()
        await asyncio.wait_for(third.reached.wait(), 10)
        await client.promote("reward")
        third.go.set()
    await stage.check_end()
    by_group: dict[tuple[int, str], set[str]] = defaultdict(set)
    for line in stage.lines("samples.jsonl"):
        by_group[line["step"], line["group_id"]].add(line["scorer"])
    assert all(len(names) == 1 for names in by_group.values()), "a group is never split"
    share = [names == {"new@2"} for (step, _), names in by_group.items() if step in (2, 3)]
    assert 0 < sum(share) < len(share) / 2
    by_step = scorers_by_step(stage)
    assert by_step[1] == {"reward": {"toy@1"}} and by_step[4] == {"reward": {"new@2"}}
    kinds = [entry["change"] for entry in stage.report()["scorers"]["changes"]]
    assert kinds == ["canary", "promote"]


async def test_a_shadow_is_compared_and_never_counts(make_stage: Callable[..., Stage], scorer: Any) -> None:
    stage: Stage = make_stage(steps=4)
    hold = await start_and_hold(stage, 1)
    other = await scorer(
        stage, "wrong@1", lambda item: reward.SampleScore(score=-float(item.completion_text == item.answer))
    )
    async with client_of(stage) as client:
        await client.shadow("reward", [other.target])
        last = Hold(stage, 4)
        hold.go.set()
        await asyncio.wait_for(last.reached.wait(), 10)
        (found,) = await client.list_scorers()
        assert found.agreement.samples >= 24
        assert found.agreement.rank_correlation == pytest.approx(-1.0)
        assert found.agreement.flip_share > 0 and found.agreement.mean_shift < 0
        with pytest.raises(WrongState, match=r"rank correlation of the shadow of reward is -1\.000, below .* 0\.5"):
            await client.promote("reward", min_rank_correlation=0.5)
        with pytest.raises(WrongState, match="below min_samples = 1000000"):
            await client.promote("reward", min_samples=1_000_000)
        await client.rollback("reward")
        last.go.set()
    await stage.check_end()
    assert all(names == {"reward": {"toy@1"}} for names in scorers_by_step(stage).values())
    assert stage.lines("metrics.jsonl")[2]["shadows/reward/rank_correlation"] == pytest.approx(-1.0)


async def test_a_new_scorer_that_does_not_score_changes_nothing(make_stage: Callable[..., Stage], scorer: Any) -> None:
    stage: Stage = make_stage(steps=2)
    hold = await start_and_hold(stage, 1)
    broken = await scorer(stage, "broken@1", lambda item: reward.SampleScore(score=float("nan")))
    alien = await scorer(stage, "alien@1")
    alien.tokenizer_sha256 = b"x" * 32
    async with client_of(stage) as client:
        before = await client.list_scorers()
        with pytest.raises(WrongState, match=r"does not score a sample that the present scorer scores: .*nan"):
            await client.swap("reward", [broken.target])
        with pytest.raises(WrongState, match="another tokenizer"):
            await client.swap("reward", [alien.target])
        with pytest.raises(Unavailable, match=r"no answer within 2 s \(.*start the service first"):
            await client.swap("reward", ["127.0.0.1:1"])
        with pytest.raises(InvalidInput, match="targets"):
            await client.swap("reward", ["10.0.0.1:5"])
        with pytest.raises(InvalidInput, match="targets is empty"):
            await client.swap("reward", [])
        with pytest.raises(NotFound, match="no scorer 'style'; there are: reward"):
            await client.swap("style", [broken.target])
        with pytest.raises(InvalidInput, match="share is 1"):
            await client.canary("reward", [broken.target], share=1.0)
        with pytest.raises(WrongState, match="the only scorer"):
            await client.remove("reward")
        with pytest.raises(WrongState, match="nothing to undo"):
            await client.rollback("reward")
        with pytest.raises(WrongState, match="neither a canary nor a shadow"):
            await client.promote("reward")
        with pytest.raises(InvalidInput, match="change is not set"):
            await client._change(pb.ChangeScorerRequest(name="reward"), 5)
        assert await client.list_scorers() == before
    hold.go.set()
    assert await stage.finish() == 0
    assert stage.report()["scorers"]["changes"] == []


async def test_terms_are_added_and_removed(make_stage: Callable[..., Stage], scorer: Any) -> None:
    stage: Stage = make_stage(steps=3)
    hold = await start_and_hold(stage, 1)
    other = await scorer(stage, "more@1", constant(3.0))
    async with client_of(stage) as client:
        await client.add("more", [other.target], weight=2.0)
        with pytest.raises(WrongState, match="there is a scorer more already"):
            await client.add("more", [other.target])
        with pytest.raises(InvalidInput, match="the name must be"):
            await client.add("no name", [other.target])
        third = Hold(stage, 2)
        hold.go.set()
        await asyncio.wait_for(third.reached.wait(), 10)
        await client.remove("reward")
        third.go.set()
    await stage.check_end()
    assert scorers_by_step(stage) == {
        1: {"reward": {"toy@1"}},
        2: {"reward": {"toy@1"}, "more": {"more@1"}},
        3: {"more": {"more@1"}},
    }
    assert {line["score"] for line in stage.lines("samples.jsonl") if line["step"] == 3} == {6.0}


async def test_changes_survive_the_coordinator(make_stage: Callable[..., Stage], scorer: Any) -> None:
    stage: Stage = make_stage(steps=4)
    hold = await start_and_hold(stage, 2)
    other = await scorer(stage, "new@2", constant(1.0))
    async with client_of(stage) as client:
        await client.swap("reward", [other.target])
    await stage.kill()
    hold.go.set()
    await stage.complete()
    by_step = scorers_by_step(stage)
    assert by_step[3] == by_step[4] == {"reward": {"new@2"}}
    assert [entry["change"] for entry in stage.report()["scorers"]["changes"]] == ["swap"]


async def test_a_rollback_goes_back_and_a_service_with_a_new_version_is_no_mixture(
    make_stage: Callable[..., Stage], scorer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(router, "_REFRESH_SECONDS", 0.05)
    stage: Stage = make_stage(steps=5)
    hold = await start_and_hold(stage, 1)
    other = await scorer(stage, "new@2", constant(1.0))
    async with client_of(stage) as client:
        await client.swap("reward", [other.target])
        second = Hold(stage, 2)
        hold.go.set()
        await asyncio.wait_for(second.reached.wait(), 10)
        other.name = "new@3"  # restarted with other code at its address
        await until(lambda: other.name == "new@3")
        await asyncio.sleep(0.3)
        third = Hold(stage, 3)
        second.go.set()
        await asyncio.wait_for(third.reached.wait(), 10)
        changed = await client.rollback("reward")
        assert list(changed.live.scorers) == ["toy@1"]
        third.go.set()
    await stage.check_end()
    by_step = {step: names["reward"] for step, names in scorers_by_step(stage).items()}
    assert by_step == {1: {"toy@1"}, 2: {"new@2"}, 3: {"new@3"}, 4: {"toy@1"}, 5: {"toy@1"}}


async def test_scores_of_a_pure_scorer_are_kept(make_stage: Callable[..., Stage]) -> None:
    stage: Stage = make_stage(steps=3)
    stage.reward.pure = True
    seen: list[tuple[str, str]] = []

    def note(item: reward.ScoreItem) -> None:
        seen.append((item.prompt_text, item.completion_text))

    stage.reward.outcome = note
    await stage.complete()
    scored = len(stage.lines("samples.jsonl")) + sum(row["n"] for row in stage.report()["evals"])
    assert len(set(seen)) <= len(seen) < scored - 10, "equal answers come from the cache"


async def test_what_a_scorer_may_cost_is_limited_over_all_coordinators_and_services(
    make_stage: Callable[..., Stage], scorer: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    def priced(item: reward.ScoreItem) -> reward.SampleScore:
        return reward.SampleScore(score=0.5, cost_usd=0.01)

    stage: Stage = make_stage(steps=50, reward={"max_cost_usd": 1.0})
    stage.reward.outcome = priced
    hold = await start_and_hold(stage, 3)
    other = await scorer(stage, "priced@2", priced)
    async with client_of(stage) as client:
        await client.swap("reward", [other.target])
    await stage.kill()
    hold.go.set()
    await stage.start()
    assert await stage.finish() == 1
    assert "scorer reward has cost 1.0" in capsys.readouterr().err
    costs = [row["scorers/reward/cost_usd"] for row in stage.lines("metrics.jsonl")]
    assert costs == sorted(costs) and costs[0] > 0.12 and 0.5 < costs[-1] < 1.2 and len(costs) < 12


async def test_a_new_scorer_may_read_what_the_present_one_does_not(
    make_stage: Callable[..., Stage], scorer: Any
) -> None:
    stage: Stage = make_stage(steps=2)
    hold = await start_and_hold(stage, 1)

    def needs_arrays(item: reward.ScoreItem) -> reward.SampleScore:
        if not item.experience.token_ids:
            return reward.SampleScore(error=reward.SampleError(code=3, reason="NO_ARRAYS"))
        return reward.SampleScore(score=1.0)

    other = await scorer(stage, "reader@1", needs_arrays)
    other.tokenizer_sha256 = stage.rollouts[0].tokenizer_sha256
    async with client_of(stage) as client:
        await client.swap("reward", [other.target])
        back = await client.rollback("reward")
        assert list(back.previous.scorers) == ["reader@1"], "it is remembered by its name"
        await client.rollback("reward")
    hold.go.set()
    assert await stage.finish() == 0
    assert scorers_by_step(stage)[2] == {"reward": {"reader@1"}}


@pytest.mark.parametrize("action", ["add", "swap", "canary", "shadow"])
async def test_one_address_in_place_of_a_list_is_refused(action: str) -> None:
    async with AsyncScorerClient("127.0.0.1:1", timeout=1) as client:
        with pytest.raises(InvalidInput, match="give a list of addresses"):
            await getattr(client, action)("x", "127.0.0.1:5000", **({"share": 0.5} if action == "canary" else {}))
