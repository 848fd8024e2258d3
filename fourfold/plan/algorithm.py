"""The algorithm of a recipe in words and formulas, from its resolved keys: what `fourfold plan` says of it.

A preset's name decides nothing here, so that a recipe which changes a key reads the change.
The formulas are computed in `services/trainer/fourfold_trainer/algorithm/`.
"""

from __future__ import annotations

from typing import Final

from fourfold.config import Config
from fourfold.config.algorithm import AlgorithmConfig, CorrectionConfig, KlConfig

_COMPARISONS: Final = {
    "grpo": "(r - mean(r)) / (std(r) + {epsilon:g}), mean and std over the samples of a prompt; 0 when all scored the "
    "same",
    "dr-grpo": "r - mean(r), mean over the samples of a prompt",
    "reinforce-baseline": "r - mean(r), mean over the samples of a prompt",
    "rloo": "r - mean of the others' r, over the samples of a prompt",
    "opo": "r - sum(n r) / sum(n), over the samples of a prompt, n their sampled tokens",
    "remax": "r - b, b = score of one more answer to the prompt, sampled greedily and not trained on",
}
_AGGREGATIONS: Final = {
    "token-mean": "{term} summed over all sampled tokens / their number: every token weighs the same",
    "sequence-mean": "{term} averaged over the tokens of each sample, then over samples: every sample weighs the same",
    "sequence-sum": "{term} summed over the tokens of each sample, averaged over samples",
    "constant-length": "{term} summed over the tokens of each sample / {length:,} (sampling.max_new_tokens), averaged "
    "over samples",
}
_KL: Final = {
    "k1": "k1 = {q} - f",
    "k2": "k2 = ({q} - f)^2 / 2",
    "k3": "k3 = exp(f - {q}) - 1 - (f - {q})",
}


def algorithm_plan(config: Config) -> list[str]:
    """Return one paragraph per part of the algorithm; parts that are switched off are left out."""
    algorithm = config.algorithm
    paragraphs = (
        _legend(config),
        _reward(config),
        _advantage(algorithm),
        _loss(algorithm),
        _total(config),
        _routers(config),
        _correction(algorithm.correction),
        _filter(config),
        _updates(config),
        _critic(config),
    )
    return [text for text in paragraphs if text]


def _legend(config: Config) -> str:
    """Name the log-probabilities that the formulas below speak of."""
    names = ["o before the step"]
    if config.algorithm.correction.kind != "none":
        names.append("u in its engine")
    if config.needs_reference:
        names.append("f under the reference")
    ratio = "; ratio = exp(p - o)" if config.algorithm.loss in ("ppo", "cispo", "sapo") else ""
    return f"p is the log-probability of a sampled token now, {', '.join(names)}{ratio}."


def _reward(config: Config) -> str:
    """What becomes of a score, in the order in which it happens."""
    shaping, longest = config.algorithm.shaping, config.sampling.max_new_tokens
    steps = []
    if shaping.normalize:
        steps.append("r = (score - running mean) / running std")
    if shaping.overlong_buffer:
        buffer = shaping.overlong_buffer * longest
        over = f"min(max(n - {longest - buffer:g}, 0), {buffer:g})"
        steps.append(f"r - {_factor(shaping.overlong_penalty)}{over} / {buffer:g} for an answer of n tokens")
    if shaping.truncated is not None:
        result = f"{shaping.truncated:g} r" if shaping.truncated >= 0 else f"{shaping.truncated:g}"
        steps.append(f"{result} when it was truncated")
    text = f"reward: r = score{''.join(f', then {step}' for step in steps)}."
    return text + (" Truncated answers are compared with, but not trained on." if shaping.mask_truncated else "")


def _advantage(algorithm: AlgorithmConfig) -> str:
    clip, kl = algorithm.shaping.clip, algorithm.kl
    bounded = f" clipped to [{-clip:g}, {clip:g}]" if clip else ""
    penalty = bool(kl.coef) and kl.placement == "reward"
    reward = f"R = r{bounded} on the last token, 0 elsewhere"
    if penalty:
        reward += f", less {_kl_term(kl, 'o')} on each"
    match algorithm.advantage:
        case "gae":
            text = (
                f"A_t = d_t + {_factor(algorithm.gamma * algorithm.gae_lambda)}A_next, d_t = R_t + "
                f"{_factor(algorithm.gamma)}V_next - V_t (GAE, gamma {algorithm.gamma:g}, lambda "
                f"{algorithm.gae_lambda:g}); {reward}"
            )
        case "reinforce":
            power = f"{algorithm.gamma:g}^(k - t) " if algorithm.gamma != 1 else ""
            text = f"A_t = sum of {power}R_k over the tokens k from t on; {reward}"
        case name:
            compared = _COMPARISONS[name].format(epsilon=algorithm.advantage_epsilon)
            text = f"A = {compared}{f';{bounded}' if bounded else ''}; the same for each token of a sample"
            if penalty:
                text = f"A_t = a - sum of {_kl_term(kl, 'o')} over the tokens from t on; a = {compared}"
                text += f";{bounded}" if bounded else ""
    if algorithm.hole_mode == "decay" and algorithm.gamma * algorithm.gae_lambda != 1:
        text += "; tokens between two turns count as steps"
    return f"advantage: {text}.{_whitening(algorithm)}"


def _whitening(algorithm: AlgorithmConfig) -> str:
    match algorithm.whiten:
        case "full":
            return " Then A = (A - mean) / std over all sampled tokens of the step."
        case "center":
            return " Then A = A - mean over all sampled tokens of the step."
        case "off":
            return ""


def _loss(algorithm: AlgorithmConfig) -> str:
    low, high = f"{1 - algorithm.clip_low:g}", f"{1 + algorithm.clip_high:g}"
    match algorithm.loss:
        case "ppo":
            text = f"l = -min(ratio A, clip(ratio, {low}, {high}) A)"
            if algorithm.dual_clip:
                text += f", at most {algorithm.dual_clip:g} |A| where A < 0"
        case "gspo":
            own = "the token's own A" if algorithm.gspo_form == "token" else "the sample's mean A"
            text = f"l = -min(s A, clip(s, {low}, {high}) A), s = exp(mean of p - o over the sample); its gradient "
            text += f"carries {own}"
        case "cispo":
            text = f"l = -stop(clip(ratio, {algorithm.ratio_min:g}, {algorithm.ratio_max:g})) A p; no gradient through "
            text += "the clipped ratio, and none is cut off"
        case "sapo":
            text = (
                f"l = -(4 / tau) sigmoid(tau (ratio - 1)) A, tau = {algorithm.sapo_tau_positive:g} where A > 0, else "
                f"{algorithm.sapo_tau_negative:g}"
            )
        case "reinforce":
            text = "l = -A p"
    return f"loss of a token: {text}."


def _total(config: Config) -> str:
    """How the losses of the tokens become one number, and what is added to them."""
    algorithm = config.algorithm
    terms = ["l" if algorithm.correction.kind == "none" else "w l"]
    if algorithm.kl.coef and algorithm.kl.placement == "loss":
        terms.append(f"+ {_kl_term(algorithm.kl, 'p')}")
    if algorithm.entropy_coef:
        terms.append(f"- {algorithm.entropy_coef:g} entropy")
    rule = _AGGREGATIONS[algorithm.aggregation]
    text = rule.format(term=" ".join(terms), length=config.sampling.max_new_tokens)
    return f"loss: {text} ({algorithm.aggregation})."


def _routers(config: Config) -> str:
    coef = config.trainer.router_aux_loss_coef
    if not coef:
        return ""
    return (
        f"loss of the routers: + {coef:g} E sum(f P), mean over the layers; f is the share of tokens routed to each of "
        f"a layer's E experts, and P its mean probability, over the tokens of a micro-batch. Micro-batches weigh as "
        f"their tokens."
    )


def _kl_term(kl: KlConfig, now: str) -> str:
    """Return the weighted estimate of a token, `now` being the policy's log-probability."""
    estimate = _KL[kl.estimator].format(q=now)
    name, _, formula = estimate.partition(" = ")
    steered = f", a weight that steers it to {kl.target:g} nats a token" if kl.target else ""
    return f"{kl.coef:g} {name} ({name} = {formula}{steered})"


def _correction(correction: CorrectionConfig) -> str:
    inside = f"[{correction.low:g}, {correction.high:g}]"
    match correction.kind:
        case "none":
            return ""
        case "tis":
            bound = f"min(exp(o - u), {correction.high:g})"
            if correction.low:
                bound = f"clip(exp(o - u), {correction.low:g}, {correction.high:g})"
            text = f"w = {bound}"
        case "icepop":
            text = f"w = exp(o - u), and 0 for a token where that is outside of {inside}"
        case "sequence-mask":
            text = f"w = 1, and 0 for a sample whose exp(mean of o - u) is outside of {inside}"
        case "sequence-mask-tis":
            text = f"w = exp(o - u), and 0 for a sample whose exp(mean of o - u) is outside of {inside}"
    return f"correction for what the engine computes otherwise: {text}."


def _filter(config: Config) -> str:
    rule = config.algorithm.filter
    most = f"{rule.max_rounds * config.batch.prompts_per_step:,} prompts a step"
    match rule.keep:
        case "all":
            return ""
        case "varied":
            kept = "whose samples all scored the same"
        case "mean-inside":
            kept = f"whose mean score is not between {rule.low:g} and {rule.high:g}"
    return f"filter: a group {kept} is replaced by the next prompt, up to {most}."


def _updates(config: Config) -> str:
    batch = config.batch
    if batch.updates_per_step == 1:
        clips = config.algorithm.loss != "reinforce"
        return "updates: 1 a step, in which p = o, so that no clip binds." if clips else ""
    passes = "1 pass" if batch.epochs_per_step == 1 else f"{batch.epochs_per_step} passes"
    parts = f" in {batch.mini_batches_per_step} mini-batches" if batch.mini_batches_per_step > 1 else ""
    return f"updates: {passes} over the batch{parts}, so that p moves away from o."


def _critic(config: Config) -> str:
    if not config.algorithm.needs_critic:
        return ""
    critic = config.critic
    weights = critic.source or f"{config.model.source}, with a new head"
    loss = "(V - G)^2 / 2"
    if critic.value_clip:
        moved = f"V_old + clip(V - V_old, {-critic.value_clip:g}, {critic.value_clip:g})"
        loss = f"max((V - G)^2, ({moved} - G)^2) / 2"
    text = f"critic: V, the weights of {weights}; learning rate {critic.learning_rate:g}, loss {loss}, G = A + V_old "
    text += "before any whitening"
    if critic.policy_starts_at_step > 1:
        text += f"; it is trained alone before step {critic.policy_starts_at_step:,}"
    return f"{text}."


def _factor(value: float) -> str:
    return "" if value == 1 else f"{value:g} "
