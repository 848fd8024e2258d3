"""What a replica is asked before it gets calls: its tokenizer, its limits and what it reads."""

from __future__ import annotations

from fourfold.coordinator.v1.membership_service_pb2 import Role

from .replica import INFO_SECONDS, Replica, ScorerInputs


async def inspect_replica(replica: Replica, tokenizer_sha256: bytes) -> str:
    """Store the properties that the replica reports.

    Returns why the replica must get no calls in a run with this tokenizer; empty if it may. Raises FourfoldError if the
    replica does not answer.
    """
    tokenizer, reason = tokenizer_sha256, ""
    match replica.member.role:
        case Role.ROLE_ROLLOUT:
            info = await replica.rollout.get_info(timeout=INFO_SECONDS)
            tokenizer, replica.capacity = info.tokenizer_sha256, info.max_concurrent_samples
            replica.vocabulary_size = info.vocabulary_size if tokenizer == tokenizer_sha256 else 0
            reason = "weights not checked yet"
        case Role.ROLE_REWARD:
            reward = await replica.reward.get_info(timeout=INFO_SECONDS)
            tokenizer = reward.tokenizer_sha256 or tokenizer
            replica.reads = ScorerInputs(tokens=bool(reward.tokenizer_sha256), messages=reward.reads_messages)
            replica.max_items, replica.scorer, replica.pure = reward.max_sample_count, reward.name, reward.pure
        case Role.ROLE_REFERENCE:
            reference = await replica.reference.get_info(timeout=INFO_SECONDS)
            tokenizer = reference.tokenizer_sha256
    if tokenizer != tokenizer_sha256:
        return f"it has another tokenizer ({tokenizer.hex()[:12] or 'none'}) than the run"
    return reason
