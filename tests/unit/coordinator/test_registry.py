"""Leases and incarnations under a clock that a test moves."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fourfold.coordinator.v1.membership_service_pb2 import Role
from fourfold.errors import ConfigError, InvalidInput, NotFound, WrongState
from fourfold_coordinator.routing.registry import TTL_SECONDS, Member, MemberChange, Registry
from tests.fakes.clock import FakeClock

TOKENIZER = b"t" * 32


def member(name: str = "rollout-0", incarnation: str = "a", **changes: Any) -> Member:
    base = Member(
        member_id=name,
        incarnation=incarnation * 32,
        role=Role.ROLE_ROLLOUT,
        target="127.0.0.1:5000",
        tokenizer_sha256=TOKENIZER,
    )
    return replace(base, **changes)


@pytest.fixture
def registry(clock: FakeClock) -> Registry:
    return Registry(clock=clock, tokenizer_sha256=TOKENIZER)


@pytest.fixture
def changes(registry: Registry) -> list[tuple[str, MemberChange]]:
    seen: list[tuple[str, MemberChange]] = []
    registry.add_listener(lambda m, change: seen.append((m.incarnation[0], change)))
    return seen


async def test_a_lease_lives_as_long_as_it_is_kept_alive(
    registry: Registry, clock: FakeClock, changes: list[tuple[str, MemberChange]]
) -> None:
    token = registry.register(member())
    for _ in range(10):
        await clock.advance(TTL_SECONDS - 0.1)
        registry.keep_alive(token)
        assert registry.expire() == []
    await clock.advance(TTL_SECONDS)
    assert [m.member_id for m in registry.expire()] == ["rollout-0"]
    assert registry.members() == []
    assert changes == [("a", MemberChange.JOINED), ("a", MemberChange.EXPIRED)]


@pytest.mark.parametrize("call_first", [True, False])
async def test_a_coordinator_that_was_stalled_gives_every_live_lease_one_more_period(
    registry: Registry,
    clock: FakeClock,
    changes: list[tuple[str, MemberChange]],
    caplog: pytest.LogCaptureFixture,
    call_first: bool,
) -> None:
    async def run(seconds: float) -> None:
        for _ in range(round(seconds)):
            await clock.advance(1.0)
            registry.beat()
            registry.expire()

    tokens = [registry.register(member(name)) for name in ("rollout-0", "rollout-1")]
    await run(10)
    registry.keep_alive(tokens[0])
    assert "stalled" not in caplog.text
    await clock.advance(TTL_SECONDS + 5)  # nothing of this process runs
    if not call_first:  # a call that waited may come before the next beat
        registry.beat()
    registry.keep_alive(tokens[1])
    assert registry.overdue("rollout-0")[0] is False
    assert "coordinator was stalled: seconds=20.0; each lease gets 15 s more" in caplog.text
    await run(TTL_SECONDS - 1)
    assert len(registry.members()) == 2 and caplog.text.count("stalled") == 1
    await run(1)
    assert changes[-1] == ("a", MemberChange.EXPIRED) and registry.members() == [], "one period, and no more"


async def test_a_member_that_leaves_during_a_stall_has_left(
    registry: Registry, clock: FakeClock, changes: list[tuple[str, MemberChange]]
) -> None:
    token = registry.register(member())
    registry.beat()
    await clock.advance(TTL_SECONDS + 5)  # nothing of this process runs
    registry.deregister(token)
    assert changes[-1] == ("a", MemberChange.LEFT) and registry.members() == []


async def test_a_lease_that_had_ended_before_a_stall_stays_so(registry: Registry, clock: FakeClock) -> None:
    token = registry.register(member())
    await clock.advance(TTL_SECONDS)
    registry.beat()
    await clock.advance(TTL_SECONDS)
    with pytest.raises(NotFound, match="register again"):
        registry.keep_alive(token)


async def test_an_expired_lease_is_never_revived(registry: Registry, clock: FakeClock) -> None:
    token = registry.register(member())
    await clock.advance(TTL_SECONDS)
    with pytest.raises(NotFound, match="register again"):
        registry.keep_alive(token)
    again = registry.register(member())  # before anybody called `expire`
    assert again != token
    assert len(registry.members()) == 1


def test_a_new_incarnation_replaces_the_old_one_for_good(
    registry: Registry, changes: list[tuple[str, MemberChange]]
) -> None:
    old = registry.register(member())
    registry.register(member(incarnation="b", target="127.0.0.1:5001"))
    assert changes == [("a", MemberChange.JOINED), ("a", MemberChange.REPLACED), ("b", MemberChange.JOINED)]
    with pytest.raises(NotFound):
        registry.keep_alive(old)
    with pytest.raises(WrongState, match="was replaced by a newer process"):
        registry.register(member())
    registry.deregister(old)  # a goodbye of the old one does not touch the new one
    assert [m.incarnation[0] for m in registry.members()] == ["b"]


async def test_the_id_of_a_live_member_is_refused_to_another_role(
    registry: Registry, changes: list[tuple[str, MemberChange]], clock: FakeClock
) -> None:
    token = registry.register(member("a-0"))
    for incarnation in ("a", "b"):
        with pytest.raises(
            WrongState, match=r"a live rollout service has this id, a-0 at 127\.0\.0\.1:5000"
        ) as refused:
            registry.register(member("a-0", incarnation, role=Role.ROLE_TRAINER))
        assert refused.value.reason == "MEMBER_ID_TAKEN"
    registry.keep_alive(token)
    assert changes == [("a", MemberChange.JOINED)]
    await clock.advance(TTL_SECONDS)
    registry.register(member("a-0", "b", role=Role.ROLE_TRAINER))
    assert [m.role_name for m in registry.members()] == ["trainer"]


def test_a_member_that_moved_keeps_its_incarnation(registry: Registry, changes: list[tuple[str, MemberChange]]) -> None:
    registry.register(member())
    registry.register(member(target="127.0.0.1:5002"))
    registry.register(member(target="127.0.0.1:5002"))
    assert [m.target for m in registry.members()] == ["127.0.0.1:5002"]
    assert [change for _, change in changes] == [MemberChange.JOINED, MemberChange.REPLACED, MemberChange.JOINED]


def test_deregistering_twice_is_harmless(registry: Registry, changes: list[tuple[str, MemberChange]]) -> None:
    token = registry.register(member())
    registry.deregister(token)
    registry.deregister(token)
    assert changes == [("a", MemberChange.JOINED), ("a", MemberChange.LEFT)]


def test_members_are_listed_by_role(registry: Registry) -> None:
    registry.register(member("b"))
    registry.register(member("a"))
    registry.register(member("c", role=Role.ROLE_REWARD))
    assert [m.member_id for m in registry.members(Role.ROLE_ROLLOUT)] == ["a", "b"]
    assert [m.peer for m in registry.members(Role.ROLE_REWARD)] == ["c at 127.0.0.1:5000"]


@pytest.mark.parametrize("role", [Role.ROLE_ROLLOUT, Role.ROLE_TRAINER, Role.ROLE_REFERENCE])
@pytest.mark.parametrize("tokenizer", [b"", b"u" * 32])
def test_another_tokenizer_is_refused(registry: Registry, role: int, tokenizer: bytes) -> None:
    with pytest.raises(WrongState, match=r"has tokenizer (none|757575757575), this run has 747474747474;") as error:
        registry.register(member(role=role, tokenizer_sha256=tokenizer))
    assert error.value.reason == "WRONG_TOKENIZER"
    assert registry.members() == []


def test_a_reward_service_needs_no_tokenizer_but_no_other_one_either(registry: Registry) -> None:
    registry.register(member(role=Role.ROLE_REWARD, tokenizer_sha256=b""))
    with pytest.raises(WrongState):
        registry.register(member("reward-1", role=Role.ROLE_REWARD, tokenizer_sha256=b"u" * 32))


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("member_id", "rollout 0", "1 to 128 characters"),
        ("incarnation", "xyz", "32 lower-case hexadecimal digits"),
        ("role", 0, "role 0 is unknown"),
        ("role", 99, "role 99 is unknown"),
        ("target", "nowhere", "is not an address"),
        ("target", "127.0.0.1:0", "has port 0, where nothing listens"),
        ("target", "127.0.0.1:\uff15", "is not an address"),
        ("target", "node-7:5000", "without TLS a service is only called on this machine"),
        ("target", "a..b:5000", "neither an IP address nor a name"),
        ("target", "a/b:5000", "neither an IP address nor a name"),
        ("target", "x" * 257 + ":5000", "an address of 262 characters"),
        ("target", "::1:5000", "put an IPv6 address in brackets"),
    ],
)
def test_a_malformed_member_is_refused(registry: Registry, field: str, value: Any, words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        registry.register(replace(member(), **{field: value}))


async def test_registering_again_renews_the_lease(registry: Registry, clock: FakeClock) -> None:
    token = registry.register(member())
    for _ in range(3):
        await clock.advance(TTL_SECONDS - 1)
        assert registry.register(member()) == token
    registry.keep_alive(token)
    await clock.advance(TTL_SECONDS - 1)
    assert registry.expire() == []


async def test_a_refused_member_changes_nothing(
    registry: Registry, clock: FakeClock, changes: list[tuple[str, MemberChange]]
) -> None:
    registry.register(member("trainer-0", role=Role.ROLE_TRAINER))
    token = registry.register(member())
    del changes[:]
    await clock.advance(TTL_SECONDS - 1)
    for refused in (
        member(incarnation="b", target="elsewhere:5000"),
        member(incarnation="b", tokenizer_sha256=b"u" * 32),
        member("trainer-1", role=Role.ROLE_TRAINER),
        member(role=Role.ROLE_TRAINER, incarnation="b"),
        member("x" * 129),
    ):
        with pytest.raises((InvalidInput, WrongState)):
            registry.register(refused)
    assert changes == []
    assert registry.register(member()) == token, "no incarnation was fenced or replaced"
    await clock.advance(1)
    assert [m.member_id for m in registry.expire()] == ["trainer-0"], "its lease was not renewed by a refused call"


async def test_a_second_trainer_is_refused_while_the_first_lives(registry: Registry, clock: FakeClock) -> None:
    registry.register(member("trainer-0", role=Role.ROLE_TRAINER))
    second = member("trainer-1", "b", role=Role.ROLE_TRAINER)
    with pytest.raises(WrongState, match="a run has one") as refused:
        registry.register(second)
    assert refused.value.reason == "SECOND_TRAINER"
    await clock.advance(TTL_SECONDS)
    registry.register(second)
    assert [m.member_id for m in registry.members(Role.ROLE_TRAINER)] == ["trainer-1"]


async def test_a_member_that_does_not_renew_its_lease_is_overdue_before_it_expires(
    registry: Registry, clock: FakeClock
) -> None:
    token = registry.register(member())
    began = clock.now()
    await clock.advance(TTL_SECONDS / 3 + 1)  # a KeepAlive that takes a second is in time
    assert registry.overdue("rollout-0") == (False, began)
    registry.keep_alive(token)
    heard = clock.now()
    assert registry.overdue("rollout-0") == (False, began)
    await clock.advance(TTL_SECONDS / 2)
    assert registry.overdue("rollout-0") == (True, heard)
    assert registry.expire() == []
    registry.keep_alive(token)
    assert registry.overdue("rollout-0") == (False, clock.now())
    assert registry.overdue("nobody") == (True, clock.now())


async def test_a_member_that_the_recipe_names_never_expires(
    registry: Registry, clock: FakeClock, changes: list[tuple[str, MemberChange]]
) -> None:
    registry.add_permanent("reward-at-x", Role.ROLE_REWARD, "127.0.0.1:5000")
    began = clock.now()
    await clock.advance(10 * TTL_SECONDS)
    assert registry.expire() == [] and registry.overdue("reward-at-x") == (False, began)
    (found,) = registry.members(Role.ROLE_REWARD)
    assert found.permanent and changes == [("0", MemberChange.JOINED)]
    with pytest.raises(ConfigError, match=r"would have the member id reward-at-x of '127.0.0.1:5000'"):
        registry.add_permanent("reward-at-x", Role.ROLE_REWARD, "127.0.0.1:5001")
    with pytest.raises(WrongState, match=r"is the name of the service at .*, which the recipe names"):
        registry.register(member("reward-at-x", role=Role.ROLE_REWARD))


@pytest.mark.parametrize(
    ("target", "text"),
    [("127.0.0.1:0", "has port 0"), ("10.0.0.1:5000", "without TLS a service is only called on this machine")],
)
def test_an_address_that_cannot_be_called_is_refused(registry: Registry, target: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        registry.add_permanent("reward-at-x", Role.ROLE_REWARD, target)
    assert registry.members() == []
