"""The formulas of every method, as pure functions. In the order in which one step uses them:

    rank 0, numpy float64, once over the whole batch
        rewards.py       scores -> shaped scores -> the reward of every token
        advantages.py    rewards -> group baselines, returns, GAE, whitening -> the advantage A of every token
        aggregation.py   lengths -> the weight c of every token in the sum that is minimised

    every rank, torch, once per micro-batch inside the update
        losses.py        log-probabilities and A -> the policy loss of every token; the critic's loss
        corrections.py   trainer against engine -> what a token's policy loss is multiplied with
        kl.py            distance to the reference policy, and the controller of its coefficient

One optimizer step minimises, over the tokens that the policy sampled,

    L = sum of c * ( weight * policy loss + kl_coef * kl - entropy_coef * entropy )

    packed.py and ratios.py hold what these files share: the packed form, and ratios that stay finite.

Rules that hold in every file:

    - A token that does not count is left out with a selection, never multiplied with 0: 0 * inf is NaN.
    - A log-ratio is clamped to +-20 before exp; outside, the gradient is 0.
    - Only the current log-probabilities and the current values carry a gradient.
    - What a batch cannot tell is exactly 0: a group of one, a group of equal scores, a sample without actions.
    - Nothing here depends on how the batch is split: all statistics are those of the whole batch.
"""
