"""`fourfold bench`: what this machine does with models of random weights.

    weights   the update of a running engine's weights (`fourfold_bench.weights`)
    rollout   a rollout service against vLLM alone
    step      whole training steps through `fourfold run`

Nothing here is imported by the product. The commands import no tensor library: models are written, and vLLM alone is
measured, by child processes.
"""
