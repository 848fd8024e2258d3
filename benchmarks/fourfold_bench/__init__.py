"""`fourfold bench`: what this machine does with models of random weights.

    weights   the update of a running engine's weights (`fourfold_bench.weights`)
    rollout   a rollout service against vLLM alone
    step      whole training steps through `fourfold run`
    long-tail a run at several policy lags
    gateway   a gateway against direct calls of its engine
    reward    a reward service with a trivial function

`trainer_speed`, `experience_path` and `run_result` are programs of their own.

Nothing here is imported by the product. The commands import no tensor library: models are written, and vLLM alone is
measured, by child processes.
"""
