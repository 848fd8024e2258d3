"""The algorithm in the plan: formulas that follow from the resolved keys."""

from __future__ import annotations

from typing import Any

import pytest

from fourfold.config import PRESETS, Config
from fourfold.plan.algorithm import algorithm_plan, noise_warnings


def config(algorithm: dict[str, Any] | None = None, **tables: Any) -> Config:
    recipe = {
        "name": "t",
        "steps": 10,
        "model": {"source": "m", "max_context_tokens": 2000},
        "data": {"train": {"path": "x.jsonl"}},
        "batch": {"prompts_per_step": 5, "group_size": 4, **tables.pop("batch", {})},
        "sampling": {"max_new_tokens": 1000},
        "algorithm": algorithm or {},
    }
    return Config.model_validate(recipe | tables)


def said(algorithm: dict[str, Any] | None = None, **tables: Any) -> str:
    """The paragraphs of a recipe, one a line."""
    return "\n".join(algorithm_plan(config(algorithm, **tables)))


def test_rounding_in_later_epochs_that_reaches_a_clip_is_a_warning() -> None:
    def warned(
        preset: str, *, dtype: str = "bfloat16", epochs: int = 2, parts: int = 5, device: str = "cpu"
    ) -> list[str]:
        batch = {"epochs_per_step": epochs, "mini_batches_per_step": parts}
        model = {"source": "m", "max_context_tokens": 2000, "dtype": dtype}
        return noise_warnings(config({"preset": preset}, batch=batch, model=model, trainer={"device": device}))

    (text,) = warned("gspo")
    assert text.startswith("batch.epochs_per_step = 2 deals samples anew to 5 mini-batches.")
    assert "in bfloat16 differ by up to 0.002 nats a token" in text and "`gspo` clips at 0.0003 nats" in text
    assert 'or model.dtype = "float32"' in text
    for quiet in (warned("gspo", dtype="float32"), warned("gspo", epochs=1), warned("gspo", parts=1)):
        assert quiet == []
    (text,) = warned("gspo", dtype="float32", device="cuda")
    assert "in float32 differ by up to 0.0001 nats a token" in text
    for each in (text, *warned("gspo", device="cuda")):
        assert 'float32"' not in each, "it would not end the warning"
    assert warned("grpo", dtype="float32", device="cuda") == []
    assert warned("grpo") == warned("gmpo") == warned("cispo") == []


def test_the_loss_of_the_routers_is_named_where_there_is_one() -> None:
    assert "routers" not in said()
    assert "loss of the routers: + 0.001 E sum(f P), mean over the layers" in said(
        trainer={"router_aux_loss_coef": 1e-3}
    )


GRPO = "advantage: A = (r - mean(r)) / (std(r) + 1e-06), mean and std over the samples of a prompt"
DISTINCTIVE = {
    "ppo": "advantage: A_t = d_t + A_next, d_t = R_t + V_next - V_t (GAE, gamma 1, lambda 1); R = r clipped to "
    "[-10, 10] on the last token, 0 elsewhere, less 0.01 k1 (k1 = o - f) on each. Then A = (A - mean) / std",
    "reinforce++": "advantage: A_t = sum of R_k over the tokens k from t on; R = r clipped to [-10, 10]",
    "reinforce++-baseline": "loss: w l + 1e-05 k2 (k2 = (p - f)^2 / 2) summed over all sampled tokens / their number",
    "rloo": "advantage: A = r - mean of the others' r, over the samples of a prompt; r is the score less 0.03 k1 (k1 = "
    "o - f) summed over the tokens of the sample.",
    "grpo": GRPO,
    "grpo-paper": "loss: l + 0.04 k3 (k3 = exp(f - p) - 1 - (f - p)) averaged over the tokens of each sample, then",
    "dr-grpo": "loss: l summed over the tokens of each sample / 1,000 (sampling.max_new_tokens), averaged over samples",
    "dapo": "reward: r = score, then r - min(max(n - 800, 0), 200) / 200 for an answer of n tokens.",
    "gspo": "loss of a token: l = -min(s A, clip(s, 0.9997, 1.0004) A), s = exp(mean of p - o over the sample); its "
    "gradient carries the token's own A.",
    "cispo": "loss of a token: l = -stop(clip(ratio, 0, 5)) A p;",
    "luspo": "loss: l summed over the tokens of each sample, averaged over samples",
    "gmpo": "loss of a token: l = -s A, s = exp(mean of d over the sample), d = p - o, at most 0.4 where A > 0",
    "dppo": "loss of a token: l = -exp(p - u) A; 0 where A > 0 and exp(p) - exp(u) > 0.2, or A <= 0 and",
    "vespo": "l = -stop(w^k exp(b - b w)) A p, w = exp(sum of p - u over the sample), k, b = 2, 3 where A >= 0, else 3",
    "gpg": "advantage: A = (B / M) (r - mean(r)), mean over the samples of a prompt; B samples of the batch, M of them",
    "otb": "advantage: A_t = G_t - sum(W_t G_t) / sum(W_t), sums over the samples of a prompt that have a token t, 0",
    "vapo": "lambda 1 - 1 / max(0.05 n, 1) for a sample of n tokens; G with lambda 1)",
    "sapo": "loss of a token: l = -(4 / tau) sigmoid(tau (ratio - 1)) A, tau = 1 where A > 0, else 1.05.",
    "decoupled": "correction of the logprob mismatch: w = clip(exp(o - u), 0, 2).",
    "verl-grpo": "loss: l + 0.001 k3 (k3 = exp(f - p) - 1 - (f - p), at most 10 and without a slope there) summed over",
    "verl-ppo": "clip(ratio, 0.8, 1.2) A), at most 3 |A| where A < 0.",
    "trl-grpo": "correction of the logprob mismatch: w = exp(sum of o - u) over the sample, and 0 where that is",
    "prime-rl": "advantage: A = r - mean(r), mean over the samples of a prompt; the same for each token of a sample.",
    "openrlhf-ppo": "advantage: A_t = d_t + A_next, d_t = R_t + V_next - V_t (GAE, gamma 1, lambda 1)",
    "openrlhf-reinforce++": "advantage: A_t = sum of R_k over the tokens k from t on",
    "openrlhf-reinforce++-baseline": "over the tokens from t on; a = r - mean(r), mean over the samples of a prompt; "
    "clipped to [-10, 10]. Then A = (A - mean) / std over all sampled tokens of the step.",
    "openrlhf-rloo": "advantage: A_t = a - sum of 0.01 k1 (k1 = o - f) over the tokens from t on; a = r - mean of the",
    "openrlhf-grpo": "a = (r - mean(r)) / (std(r) + 1e-09)",
    "openrlhf-dr-grpo": "loss: l summed over all sampled tokens / their number: every token weighs the same",
    "openrlhf-gspo": "clip(s, 0.8, 1.2) A), s = exp(mean of p - o over the sample); its gradient carries the sample's",
}


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_is_explained_by_its_formula(preset: str) -> None:
    assert DISTINCTIVE[preset] in said({"preset": preset})


def test_presets_that_differ_read_differently() -> None:
    texts = {preset: said({"preset": preset}) for preset in PRESETS}
    # Apart in hole_mode alone, which says nothing at gamma = lambda = 1.
    assert texts.pop("openrlhf-ppo") == texts["ppo"] and texts.pop("openrlhf-reinforce++") == texts["reinforce++"]
    assert len(set(texts.values())) == len(texts)


@pytest.mark.parametrize(
    ("algorithm", "words"),
    [
        ({"advantage": {"kind": "remax"}}, "A = r - b, b = score of one more answer to the prompt, sampled greedily"),
        ({"advantage": {"kind": "opo"}}, "A = r - sum(n r) / sum(n), over the samples of a prompt"),
        (
            {"advantage": {"kind": "gae", "gamma": 0.9, "lam": 0.5}},
            "A_t = d_t + 0.45 A_next, d_t = R_t + 0.9 V_next - V_t",
        ),
        (
            {"advantage": {"kind": "reinforce", "gamma": 0.9}},
            "sum of 0.9^(k - t) R_k over the tokens k from t on; R = r on the last",
        ),
        (
            {"advantage": {"kind": "reinforce", "gamma": 0.9, "hole_mode": "decay"}},
            "tokens between two turns count as steps;",
        ),
        ({"advantage": {"kind": "grpo", "epsilon": 0.5}}, "(std(r) + 0.5)"),
        ({"whiten": "center"}, "Then A = A - mean over all sampled tokens"),
        ({"loss": {"clip_low": 0.1, "clip_high": 0.3}}, "clip(ratio, 0.9, 1.3)"),
        ({"loss": {"dual_clip": 3.0}}, "at most 3 |A| where A < 0"),
        ({"loss": {"kind": "reinforce"}}, "l = -A p."),
        ({"loss": {"kind": "cispo", "ratio_min": 0.5, "ratio_max": 2}}, "clip(ratio, 0.5, 2)"),
        ({"loss": {"kind": "sapo", "tau_negative": 3}}, "else 3."),
        ({"loss": {"kind": "gspo", "form": "sequence"}}, "carries the sample's mean A"),
        (
            {"aggregation": "sequence-sum"},
            "l summed over the tokens of each sample, averaged over samples (sequence-sum)",
        ),
        ({"entropy_coef": 0.01}, "l - 0.01 entropy summed over all"),
        ({"kl": {"coef": 0.2, "target": 0.1, "horizon": 9999}}, "a weight that steers it to 0.1 nats a token"),
        ({"kl": {"coef": 0.2}}, "f under the reference"),
        ({"correction": {"kind": "tis", "low": 0.5}}, "w = clip(exp(o - u), 0.5, 2)"),
        (
            {"correction": {"kind": "icepop", "low": 0.5}},
            "w = exp(o - u), and 0 for a token where that is outside of [0.5",
        ),
        ({"correction": {"kind": "sequence-mask"}}, "w = 1, and 0 for a sample whose exp(mean of o - u) is outside"),
        ({"correction": {"kind": "sequence-mask-tis"}}, "w = exp(o - u), and 0 for a sample whose exp(mean"),
        ({"shaping": {"normalize": True}}, "r = score, then r = (score - running mean) / running std."),
        ({"shaping": {"truncated": 0.5}}, "r = score, then 0.5 r when it was truncated."),
        ({"shaping": {"truncated": -1}}, "then -1 when it was truncated."),
        ({"shaping": {"mask_truncated": True}}, "Truncated answers are compared with, but not trained on."),
        ({"shaping": {"overlong_buffer": 0.5, "overlong_penalty": 3}}, "r - 3 min(max(n - 500, 0), 500) / 500"),
        ({"shaping": {"clip": 5}}, "clipped to [-5, 5]"),
        ({"filter": {"keep": "varied"}}, "whose samples all scored the same is replaced by the next prompt, up to 50"),
        ({"filter": {"keep": "mean-inside", "low": 0.2, "max_rounds": 3}}, "mean score is not between 0.2 and 1"),
    ],
)
def test_a_key_that_a_recipe_changes_is_read_in_its_text(algorithm: dict[str, Any], words: str) -> None:
    assert words in said(algorithm)
    assert words not in said()


def test_a_curriculum_is_told() -> None:
    data = {"train": {"path": "x.jsonl"}, "curriculum": {}}
    assert "curriculum: a prompt is drawn with the probability 0.1 + 0.9 * 4 r (1 - r) when" in said(data=data)
    assert "curriculum" not in said()


def test_the_critic_and_the_updates_are_told() -> None:
    ppo = {"preset": "ppo"}
    text = said(ppo, critic={"policy_starts_at_step": 5, "learning_rate": 1e-3})
    assert (
        "critic: V, the weights of m, with a new head; learning rate 0.001, loss max((V - G)^2, (V_old + clip(V" in text
    )
    assert "it is trained alone before step 5." in text
    assert "loss (V - G)^2 / 2, G = A + V_old" in said(ppo, critic={"value_clip": 0, "source": "rm"})
    assert "the weights of rm;" in said(ppo, critic={"source": "rm"})
    assert "updates: 1 a step, in which p = o, so that no clip binds." in said()
    assert "updates" not in said({"loss": {"kind": "reinforce"}})
    batch = {"mini_batches_per_step": 2, "epochs_per_step": 3}
    assert "updates: 3 passes over the batch in 2 mini-batches, so that p moves away from o." in said(batch=batch)
    assert "critic" not in said(critic={"source": "rm"})


def test_gdpo_says_how_terms_are_joined() -> None:
    text = said({"advantage": {"kind": "gdpo"}, "shaping": {"clip": 5.0}})
    assert (
        "advantage: A = S / (std(S) + 1e-06), std over the batch, S = sum over the terms k of the score of "
        "w_k (r_k - mean(r_k)) / (std(r_k) + 1e-06), mean and std over the samples of a prompt in which the term "
        "counts; 0 for a term in which all scored the same; clipped to [-5, 5]; the same for each token of a sample."
    ) in text
    text = said({"advantage": {"kind": "gdpo", "normalize_batch": False}, "whiten": "full"})
    assert "advantage: A = sum over the terms k" in text and "Then A = (A - mean) / std over all sampled" in text
