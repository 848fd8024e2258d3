"""Defines every algorithm: pure functions, and registered losses and estimators. In the order of one step:

    rank 0, numpy float64, once over the whole batch
        rewards.py       scores -> shaped scores -> the reward R of every token
        advantages/      group baselines and recursions over tokens -> the advantage A of every token    (registered)
        packed.py        arrays over action tokens: sums to come, whitening
        comparison.py    comparisons of the turns, or of the tokens, of a group
        aggregation.py   lengths -> the weight c of every token in the loss
        state.py         what is kept for the next step

    every rank, torch, once per micro-batch
        losses/          log-probabilities and A -> the policy loss of every token; the critic's loss    (registered)
        corrections.py   trainer against engine -> the weight w of a token's policy loss
        kl.py            distance to the reference policy, and the controller of its coefficient
        ratios.py        ratios that stay finite, means over samples

One optimizer step minimises, over the tokens that the policy sampled,

    L = sum of c * ( w * policy loss + kl_coef * kl - entropy_coef * entropy )

Rules that hold in every file:

    - A token that does not count is left out with a selection, never multiplied by 0: 0 * inf is NaN.
    - A log-ratio is clamped to +-20 before exp; outside, the gradient is 0.
    - Only the current log-probabilities and the current values carry a gradient.
    - An advantage without a baseline is exactly 0: a group of one, a group of equal scores, a sample without actions.
    - All statistics are those of the whole batch: results do not depend on how the batch is split.
    - torch is imported for type checks alone; numpy is not imported by the modules that the recipe's schema reads.
"""
