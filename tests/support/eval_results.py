"""Results of held-out sets, for displays."""

from __future__ import annotations

from fourfold_coordinator.state.eval_results import AtK, SetResult


def make_result(name: str, *, score: float = 0.5, interval: tuple[float, float] | None = None) -> SetResult:
    """Return a result of 8 answers to 4 prompts."""
    pass_at = tuple(AtK(k=k, value=value, half_width=0.1, prompt_count=4) for k, value in ((1, score), (2, 0.75)))
    return SetResult(
        name=name,
        score=score,
        half_width=0.25,
        answer_count=8,
        missing_count=0,
        tokens_per_answer=3.5,
        seconds=1.25,
        pass_at=pass_at,
        majority_at=pass_at[:1],
        interval=interval,
    )
