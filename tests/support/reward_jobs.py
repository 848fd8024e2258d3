"""Jobs of the reward service's pools and models."""

from __future__ import annotations

from typing import Any

from fourfold_reward.job import Job


def make_job(completion: str = "", **fields: Any) -> Job:
    """Return a job of one sample; all that is not given is empty."""
    values: dict[str, Any] = {"sample_id": "s", "prompt": "", "answer": "", "metadata_json": "", "size_bytes": 10}
    return Job(completion=completion, **(values | fields))
