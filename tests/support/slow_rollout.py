"""`fourfold` with a slow rollout engine: `python -m tests.support.slow_rollout serve rollout RECIPE`."""

from __future__ import annotations

import os
import sys
from functools import partial
from typing import Any

from fourfold_rollout.generate import servicer
from fourfold_rollout.generate.coalesce import RequestCoalescer
from fourfold_rollout.vllm import environment

_RUNNING = os.environ.get("SLOW_ROLLOUT_RUNNING")


def _slow_down() -> None:
    # Calls of one wave arrive in time to be one batch, and each engine step takes several milliseconds.
    module: Any = servicer
    module.RequestCoalescer = partial(RequestCoalescer, quiet=0.15, longest=2.0)
    real = environment.prepare

    def prepare(*given: object, **more: object) -> None:
        real(*given, **more)  # type: ignore[arg-type]
        from fourfold_rollout.vllm import engine_args, launch  # vLLM reads the environment when it is imported

        engine_args._WORKER_EXTENSION = "tests.support.slow_worker.SlowWorker"  # type: ignore[misc]
        if _RUNNING is not None:
            launch_module: Any = launch
            launch_module.engine_args = partial(_engine_args, launch_module.engine_args, int(_RUNNING))

    environment.prepare = prepare


def _engine_args(real: Any, running: int, *given: object) -> Any:
    args = real(*given)
    args.max_num_seqs = running
    return args


if __name__ == "__main__":
    from fourfold.cli.main import main

    _slow_down()
    sys.exit(main())
