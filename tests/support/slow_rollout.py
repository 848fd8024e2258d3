"""`fourfold` with a slow rollout engine: `python -m tests.support.slow_rollout serve rollout RECIPE`."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

from fourfold_rollout.generate import servicer
from fourfold_rollout.generate.coalesce import RequestCoalescer
from fourfold_rollout.vllm import environment


def _slow_down() -> None:
    # Calls of one wave arrive in time to be one batch, and each engine step takes several milliseconds.
    module: Any = servicer
    module.RequestCoalescer = partial(RequestCoalescer, quiet=0.15, longest=2.0)
    real = environment.prepare

    def prepare(*given: object, **more: object) -> None:
        real(*given, **more)  # type: ignore[arg-type]
        from fourfold_rollout.vllm import engine_args  # vLLM reads the environment when it is imported

        engine_args._WORKER_EXTENSION = "tests.support.slow_worker.SlowWorker"  # type: ignore[misc]

    environment.prepare = prepare


if __name__ == "__main__":
    from fourfold.cli.main import main

    _slow_down()
    sys.exit(main())
