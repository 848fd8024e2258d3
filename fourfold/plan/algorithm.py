"""Describes the algorithm of a recipe in formulas, for `fourfold plan`.

The text follows from the resolved keys, never from the name of the preset, so that it shows every changed key. The
formulas of losses, estimators and corrections are next to their code in `fourfold/algorithm/`.
"""

from __future__ import annotations

from typing import Final

from fourfold.algorithm import aggregation, corrections, kl
from fourfold.algorithm.advantages.base import factor
from fourfold.algorithm.registry import Definition, foreign_code
from fourfold.config import Config
from fourfold.config.algorithm import AlgorithmConfig, KlConfig
from fourfold.config.schema import CURRICULUM_GROUPS, CURRICULUM_LEAST

# Largest |p - o| of a token at the same weights in micro-batches of other samples, in nats: benchmarks/results,
# logprob_noise-tiny-*-cpu and logprob_noise-trained-float32-cuda, rounded up. In bfloat16 the one GPU measured there
# had none; others may use other kernels, so that the plan takes the noise of CPUs.
_NOISE: Final = {
    "bfloat16": {"cpu": 2e-3, "cuda": 2e-3},
    "float32": {"cpu": 1e-6, "cuda": 1e-4},
}
_NEAR: Final = 10.0  # a clip that is not this many times as wide as the noise is close to it


def noise_warnings(config: Config) -> list[str]:
    """Return a warning if rounding in later epochs can reach the clip of the loss."""
    batch, loss, device = config.batch, config.algorithm.loss, config.trainer.device
    noise, clip = _NOISE[config.model.dtype][device], loss.narrowest_clip()
    if batch.epochs_per_step == 1 or batch.mini_batches_per_step == 1 or clip >= _NEAR * noise:
        return []
    float32_helps = clip >= _NEAR * _NOISE["float32"][device]
    return [
        f"batch.epochs_per_step = {batch.epochs_per_step} deals samples anew to {batch.mini_batches_per_step} "
        f"mini-batches. In other micro-batches, log-probabilities in {config.model.dtype} differ by up to {noise:g} "
        f"nats a token, with the same weights; loss.kind = `{loss.kind}` clips at {clip:.2g} nats, so that rounding "
        f"may clip samples. Set epochs_per_step = 1, mini_batches_per_step = 1, or a wider clip"
        + (', or model.dtype = "float32"' if float32_helps else "")
        + ". policy/logprob_noise_later_epochs and policy/sample_noise_later_epochs measure the noise of a run."
    ]


def algorithm_plan(config: Config) -> list[str]:
    """Return one paragraph for each part of the algorithm that is switched on."""
    algorithm = config.algorithm
    if algorithm.loss.of_answers:
        chosen = _filter(config), _selection(config), _curriculum(config)
        of_units = _legend(config), _units(algorithm), _routers(config), *chosen
        return [text for text in of_units if text]
    paragraphs = (
        _legend(config),
        _reward(config),
        _advantage(algorithm),
        f"loss of a token: {_formula(algorithm.loss)}.",
        _total(config),
        _routers(config),
        _correction(algorithm),
        _filter(config),
        _selection(config),
        _curriculum(config),
        _updates(config),
        _critic(config),
    )
    return [text for text in paragraphs if text]


def _units(algorithm: AlgorithmConfig) -> str:
    """Describe the loss of whole answers and its reduction to one number."""
    unit = {"pairs": "pair", "steps": "labelled step"}.get(algorithm.loss.reads, "answer")
    text = f"loss of {'an' if unit == 'answer' else 'a'} {unit}: {_formula(algorithm.loss)}; r is its label. "
    text += f"The loss of a step is the mean over its {unit}s"
    if algorithm.sft_coef:
        text += f", + {factor(algorithm.sft_coef)}the mean of -p over the tokens of the preferred answers"
    return f"{text}."


def _formula(definition: Definition) -> str:
    with foreign_code(f"algorithm: the formula of kind {definition.kind!r} of {type(definition).__module__} failed"):
        return definition.formula()


def _legend(config: Config) -> str:
    """Define the log-probabilities of the formulas, or the scores."""
    if config.algorithm.loss.trains == "scores":
        scored = "a step, after its separator" if config.algorithm.loss.reads == "steps" else "a text"
        return (
            f"model: {config.model.source} with a head of one number in place of its output embedding; it begins with "
            f"the head of a reward model's folder, or at 0. Its score h is that of the last token of {scored}."
        )
    names = ["o before the step"] if config.algorithm.loss.compares_with_old else []
    if config.algorithm.correction.kind != "none" or config.algorithm.loss.corrects_lag:
        names.append("u in its engine")
    if config.algorithm.needs_reference:
        names.append("f under the reference")
    ratio = "; ratio = exp(p - o)" if "ratio" in _formula(config.algorithm.loss) else ""
    of_data = config.algorithm.loss.of_answers or not config.needs_engines
    token = "token of an answer" if of_data else "sampled token"
    return f"p is the log-probability of a {token}{', '.join([' now', *names])}{ratio}."


def _reward(config: Config) -> str:
    """Describe the changes of a score, in their order."""
    shaping, longest = config.algorithm.shaping, config.sampling.max_new_tokens
    if config.algorithm.distills:
        return ""
    if not config.needs_engines:
        return "reward: r is the weight of the row, 1 unless `data.weight_field` names a column."
    steps = []
    if shaping.normalize:
        steps.append("r = (score - running mean) / running std")
    if shaping.overlong_buffer:
        buffer = shaping.overlong_buffer * longest
        over = f"min(max(n - {longest - buffer:g}, 0), {buffer:g})"
        steps.append(f"r - {factor(shaping.overlong_penalty)}{over} / {buffer:g} for an answer of n tokens")
    if shaping.truncated is not None:
        result = f"{shaping.truncated:g} r" if shaping.truncated >= 0 else f"{shaping.truncated:g}"
        steps.append(f"{result} when it was truncated")
    text = f"reward: r = score{''.join(f', then {step}' for step in steps)}."
    if shaping.mask_truncated:
        text += " Truncated answers are compared with, but not trained on"
        text += "; they count in the divisors of the loss." if shaping.count_masked else "."
    return text


def _advantage(algorithm: AlgorithmConfig) -> str:
    bounds, estimator = algorithm.shaping.bounds, algorithm.advantage
    bounded = f" clipped to [{bounds[0]:g}, {bounds[1]:g}]" if bounds else ""
    penalty = _kl_term(algorithm.kl, "o") if algorithm.kl.coef and algorithm.kl.placement == "reward" else ""
    text = _formula(estimator)
    if algorithm.distills:
        pass
    elif estimator.per_token:
        text += f"; R = r{bounded} on the last token, 0 elsewhere" + (f", less {penalty} on each" if penalty else "")
    else:
        text += f";{bounded}" if bounded else ""
        if penalty and estimator.compares_kl:
            text = f"A = {text}; r is the score less {penalty} summed over the tokens of the sample"
        elif penalty:
            text = f"A_t = a - sum of {penalty} over the tokens from t on; a = {text}"
        else:
            text = f"A = {text}; the same for each token of a {'turn' if estimator.compares_turns else 'sample'}"
    return f"advantage: {text}.{_whitening(algorithm)}"


def _whitening(algorithm: AlgorithmConfig) -> str:
    match algorithm.whiten:
        case "full":
            return " Then A = (A - mean) / std over all sampled tokens of the step."
        case "center":
            return " Then A = A - mean over all sampled tokens of the step."
        case "off":
            return ""


def _total(config: Config) -> str:
    """Describe the terms of the loss and their reduction to one number."""
    algorithm = config.algorithm
    terms = ["l" if algorithm.correction.kind == "none" else "w l"]
    if algorithm.kl.coef and algorithm.kl.placement == "loss":
        weight = " exp(p - o)" if algorithm.kl.importance_weighted else ""
        terms.append(f"+ {_kl_term(algorithm.kl, 'p')}{weight}")
    if algorithm.entropy_coef:
        terms.append(f"- {algorithm.entropy_coef:g} entropy")
    if algorithm.sft_coef:
        terms.append(f"- {factor(algorithm.sft_coef)}A p")
    text = aggregation.FORMULAS[algorithm.aggregation].format(
        term=" ".join(terms), length=config.sampling.max_new_tokens
    )
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


def _kl_term(config: KlConfig, p: str) -> str:
    """Return the weighted estimate of a token, `p` being the policy's log-probability."""
    formula = kl.FORMULAS[config.estimator].format(p=p)
    bounded = config.estimator == "k3" and config.k3_max
    slope = "" if config.importance_weighted or config.placement == "reward" else " and without a slope there"
    formula += f", at most {config.k3_max:g}{slope}" if bounded else ""
    steered = f", a weight that steers it to {config.target:g} nats a token" if config.target else ""
    return f"{config.coef:g} {config.estimator} ({config.estimator} = {formula}{steered})"


def _correction(algorithm: AlgorithmConfig) -> str:
    kind = algorithm.correction.kind
    if kind == "none":
        return ""
    formula = corrections.FORMULAS[kind].format(low=algorithm.correction.low, high=algorithm.correction.high)
    return f"correction of the logprob mismatch: {formula}."


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


def _selection(config: Config) -> str:
    rule, algorithm = config.algorithm.selection, config.algorithm
    if rule.kind == "none":
        return ""
    most = f"{algorithm.filter.max_rounds * config.batch.prompts_per_step:,} prompts a step"
    bound = "" if rule.threshold is None else f", of those with r >= {rule.threshold:g}"
    margin = f"r_w - r_l is {f'at least {rule.min_margin:g}' if rule.min_margin else 'above 0'}"
    chosen = {
        "best": f"the answer with the greatest r{bound}",
        "above": f"all answers{bound}",
        "top": f"the {rule.count} answers with the greatest r{bound}",
        "best-worst": f"the answers with the greatest and the smallest r, as one pair, if {margin}",
        "all-pairs": f"all pairs of answers whose {margin}",
    }[rule.kind]
    return (
        f"selection: of a group of {config.batch.group_size} answers, {chosen}; the others are not trained on. "
        f"A group without any is replaced by the next prompt, up to {most}."
    )


def _curriculum(config: Config) -> str:
    rule = config.data.curriculum
    if rule is None:
        return ""
    weight = f"{CURRICULUM_LEAST:g} + {1 - CURRICULUM_LEAST:g} * 4 r (1 - r)"
    return (
        f"curriculum: a prompt is drawn with the probability {weight} when its turn comes, r the share of scores from "
        f"{rule.success:g} on in its latest {CURRICULUM_GROUPS} groups."
    )


def _updates(config: Config) -> str:
    batch = config.batch
    if batch.updates_per_step == 1:
        compares = config.algorithm.loss.compares_with_old
        return "updates: 1 a step, in which p = o, so that no clip binds." if compares else ""
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
