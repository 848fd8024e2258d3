"""The name, unit and meaning of every metric of a step.

One line of `runs/NAME/metrics.jsonl` is one step: a JSON object with these names. The trainer
sends its part in `TrainStepResponse.metrics` under the same names. A name that is not in
`METRICS` is a bug. Besides them a line has `step`, `diagnosis` (in words what is wrong with the
step; empty: nothing) and `alarms` (what of it was told in the log).
"""

from __future__ import annotations

from typing import Final

REWARD_MEAN: Final = "reward/mean"
REWARD_STD: Final = "reward/std"
REWARD_MIN: Final = "reward/min"
REWARD_MAX: Final = "reward/max"
SCORE_MEAN: Final = "score/mean"
ABSTAIN_COUNT: Final = "score/abstain_count"
USEFUL_GROUPS: Final = "groups/useful"
GROUPS_ALL_MAX: Final = "groups/all_max"
GROUPS_ALL_MIN: Final = "groups/all_min"
GROUPS_STD: Final = "groups/std_mean"
FILTER_ACCEPT_RATE: Final = "groups/filter_accept_rate"
PROMPTS_CONSUMED: Final = "groups/prompts_consumed"
RESPONSE_LENGTH: Final = "length/response_mean"
RESPONSE_LENGTH_P95: Final = "length/response_p95"
RESPONSE_LENGTH_MAX: Final = "length/response_max"
TOTAL_LENGTH: Final = "length/total_mean"
TURNS: Final = "length/turns_mean"
TRUNCATION_RATE: Final = "length/truncation_rate"
NO_ACTION_RATE: Final = "length/no_action_rate"
POLICY_LOSS: Final = "policy/loss"
APPROX_KL: Final = "policy/approx_kl"
APPROX_KL_K1: Final = "policy/approx_kl_k1"
CLIP_FRACTION_LOW: Final = "policy/clip_fraction_low"
CLIP_FRACTION_HIGH: Final = "policy/clip_fraction_high"
DUAL_CLIP_FRACTION: Final = "policy/dual_clip_fraction"
RATIO_MEAN: Final = "policy/ratio_mean"
RATIO_MIN: Final = "policy/ratio_min"
RATIO_MAX: Final = "policy/ratio_max"
ENTROPY: Final = "policy/entropy"
KL_LOSS: Final = "kl/loss"
REFERENCE_KL: Final = "kl/ref"
REWARD_KL: Final = "kl/reward"
KL_COEF: Final = "kl/coef"
ADVANTAGE_MEAN: Final = "advantage/mean"
ADVANTAGE_STD: Final = "advantage/std"
ADVANTAGE_ABSMAX: Final = "advantage/absmax"
REWARD_PENALTY: Final = "reward/penalty_mean"
VALUE_LOSS: Final = "value/loss"
VALUE_CLIP_FRACTION: Final = "value/clip_fraction"
EXPLAINED_VARIANCE: Final = "value/explained_variance"
RETURN_MEAN: Final = "return/mean"
MISMATCH_MEAN: Final = "mismatch/logprob_diff_mean"
MISMATCH_MAX: Final = "mismatch/logprob_diff_max"
MISMATCH_P99: Final = "mismatch/logprob_diff_p99"
MISMATCH_PROBABILITY: Final = "mismatch/prob_diff_mean"
MISMATCH_KL: Final = "mismatch/kl_k3"
MISMATCH_KL_K1: Final = "mismatch/kl_k1"
MISMATCH_CHI2: Final = "mismatch/chi2"
MISMATCH_NONFINITE: Final = "mismatch/nonfinite"
EFFECTIVE_SAMPLE_SIZE: Final = "mismatch/ess"
CORRECTION_WEIGHT: Final = "mismatch/is_weight_mean"
CORRECTION_WEIGHT_MIN: Final = "mismatch/is_weight_min"
CORRECTION_WEIGHT_MAX: Final = "mismatch/is_weight_max"
TRUNCATED_WEIGHTS: Final = "mismatch/truncated_fraction"
REJECTED_TOKENS: Final = "mismatch/rejected_token_fraction"
REJECTED_SAMPLES: Final = "mismatch/rejected_sample_fraction"
ROUTER_LOSS: Final = "moe/aux_loss"
ROUTER_VIOLATION: Final = "moe/max_violation"
GRAD_NORM: Final = "train/grad_norm"
CRITIC_GRAD_NORM: Final = "train/critic_grad_norm"
LEARNING_RATE: Final = "train/lr"
CRITIC_LEARNING_RATE: Final = "train/critic_lr"
UPDATES: Final = "train/updates"
TRAIN_SPEED: Final = "train/tokens_per_second"
TRAIN_TFLOPS: Final = "train/tflops_per_second"
MFU: Final = "train/mfu"
SKIPPED_STEPS: Final = "train/skipped_steps"
NONFINITE_LOSS: Final = "train/nonfinite_loss"
TRAINED_TOKENS: Final = "train/tokens_per_step"
TRAINED_SAMPLES: Final = "train/samples_per_step"
DUMMY_FRACTION: Final = "train/dummy_fraction"
PADDING_FRACTION: Final = "train/padding_fraction"
POLICY_LAG_MEAN: Final = "train/policy_lag_mean"
POLICY_LAG_MAX: Final = "train/policy_lag_max"
LAG_SPAN: Final = "train/lag_span"
PROBE_DIFF_MEAN: Final = "weights/probe_diff_mean"
PROBE_DIFF_MAX: Final = "weights/probe_diff_max"
PUBLISH_SECONDS: Final = "weights/publish_seconds"
PAUSE_SECONDS: Final = "weights/pause_seconds"
JOIN_SECONDS: Final = "weights/join_seconds"
LOOKUP_SECONDS: Final = "weights/lookup_seconds"
SEND_SECONDS: Final = "weights/send_seconds"
TRANSFER_SECONDS: Final = "weights/transfer_seconds"
COMMIT_SECONDS: Final = "weights/commit_seconds"
PROBE_SECONDS: Final = "weights/probe_seconds"
ROLLOUT_SPEED: Final = "rollout/tokens_per_second"
ENGINE_SPEED_MIN: Final = "rollout/engine_tokens_per_second_min"
ENGINE_SPEED_MAX: Final = "rollout/engine_tokens_per_second_max"
KV_CACHE_USE: Final = "rollout/kv_cache_use_max"
TIME_GENERATE: Final = "time/generate"
TIME_REWARD: Final = "time/reward"
TIME_REFERENCE: Final = "time/reference"
TIME_SLEEP: Final = "time/sleep"
TIME_TRAIN: Final = "time/train"
TIME_WAKE: Final = "time/wake"
TIME_PUBLISH: Final = "time/publish"
TIME_EVALUATE: Final = "time/evaluate"
TIME_CHECKPOINT: Final = "time/checkpoint"
TIME_OTHER: Final = "time/other"
TIME_STEP: Final = "time/step"
DROPPED_SAMPLES: Final = "samples/dropped"
CERTIFICATE_SECONDS: Final = "security/certificate_seconds"
EVAL_SCORE: Final = "eval/score"
EVAL_HALF_WIDTH: Final = "eval/half_width"

METRICS: Final[dict[str, str]] = {
    # Rewards, groups and lengths are those of everything that was generated, before [algorithm.filter]: of the groups
    # that it lets through alone, a pass rate would be that of prompts of medium difficulty.
    REWARD_MEAN: "score units: mean score of all samples generated for the step, before the filter and any penalty",
    REWARD_STD: "score units: standard deviation of these scores",
    REWARD_MIN: "score units: lowest of these scores",
    REWARD_MAX: "score units: highest of these scores",
    SCORE_MEAN: "score units: mean score of the samples that came to the trainer: after the filter, before any penalty",
    ABSTAIN_COUNT: "samples: on which the scorer had nothing to say",
    USEFUL_GROUPS: "share in [0, 1]: groups whose scores differ, of all generated for the step, before the filter",
    GROUPS_ALL_MAX: "share in [0, 1]: groups in which every sample has the step's highest score, before the filter",
    GROUPS_ALL_MIN: "share in [0, 1]: groups in which every sample has the step's lowest score, before the filter",
    GROUPS_STD: "score units: standard deviation of the scores within a group, mean over the groups, before the filter",
    FILTER_ACCEPT_RATE: "share in [0, 1]: groups that the filter let through, of all generated; 1 without a filter",
    PROMPTS_CONSUMED: "prompts: drawn for the step, those of filtered and lost groups included",
    RESPONSE_LENGTH: "tokens: mean length of a completion, before the filter",
    RESPONSE_LENGTH_P95: "tokens: 95th percentile of the lengths of completions, before the filter",
    RESPONSE_LENGTH_MAX: "tokens: length of the longest completion, before the filter",
    TOTAL_LENGTH: "tokens: mean length of a sample, prompt and all turns, before the filter",
    TURNS: "turns: mean number of stretches of sampled tokens in a sample, before the filter",
    TRUNCATION_RATE: "share in [0, 1]: completions that a budget ended, before the filter",
    NO_ACTION_RATE: "share in [0, 1]: samples without a sampled token, before the filter",
    POLICY_LOSS: "value of the minimised policy loss, as the recipe adds it up; mean over the step's updates",
    APPROX_KL: "nats per token: k3 estimate of KL(old || current) during the update",
    APPROX_KL_K1: "nats per token: k1 estimate of the same, which may be below 0",
    CLIP_FRACTION_LOW: "share in [0, 1]: trained tokens whose ratio is below 1 - clip_low, and is clipped",
    CLIP_FRACTION_HIGH: "share in [0, 1]: trained tokens whose ratio is above 1 + clip_high, and is clipped",
    DUAL_CLIP_FRACTION: "share in [0, 1]: trained tokens whose loss the dual clip bounds",
    RATIO_MEAN: "mean importance ratio, current to old, of trained tokens",
    RATIO_MIN: "smallest of them",
    RATIO_MAX: "largest of them",
    ENTROPY: "nats: mean entropy of the policy at the sampling temperature, over trained tokens",
    KL_LOSS: "nats: value of the KL term of the loss, before its coefficient; mean over the step's updates",
    REFERENCE_KL: "nats per token: k3 estimate of KL(old || reference), over trained tokens",
    REWARD_KL: "nats per token: the estimate that is subtracted from the rewards",
    KL_COEF: "coefficient of the KL term in this step",
    ADVANTAGE_MEAN: "mean advantage over the step's loss tokens",
    ADVANTAGE_STD: "standard deviation of the advantages over the step's loss tokens",
    ADVANTAGE_ABSMAX: "largest absolute advantage",
    REWARD_PENALTY: "score units: mean change that shaping made to the scores; a penalty is below 0",
    VALUE_LOSS: "score units squared: value of the critic's loss",
    VALUE_CLIP_FRACTION: "share in [0, 1]: tokens whose value loss is that of the clipped value",
    EXPLAINED_VARIANCE: "share, at most 1: of the variance of the returns that the critic foresaw; below 0: harmful",
    RETURN_MEAN: "score units: mean return, what the critic learns to predict",
    MISMATCH_MEAN: "nats: mean |trainer logprob - engine logprob| over trained tokens, same weights",
    MISMATCH_MAX: "nats: largest |trainer logprob - engine logprob|",
    MISMATCH_P99: "nats: 99th percentile of |trainer logprob - engine logprob|",
    MISMATCH_PROBABILITY: "mean |trainer probability - engine probability| over trained tokens",
    MISMATCH_KL: "nats per token: k3 estimate of KL(engine || trainer)",
    MISMATCH_KL_K1: "nats per token: k1 estimate of KL(engine || trainer)",
    MISMATCH_CHI2: "mean squared ratio of trainer to engine, minus 1",
    MISMATCH_NONFINITE: "tokens: whose engine log-probability is not finite; they are left out of these numbers",
    EFFECTIVE_SAMPLE_SIZE: "share in (0, 1]: of trained tokens that count after weighting with that ratio",
    CORRECTION_WEIGHT: "mean weight that the correction gives to a token; a rejected one has 0",
    CORRECTION_WEIGHT_MIN: "smallest weight of a token that is not rejected",
    CORRECTION_WEIGHT_MAX: "largest of them",
    TRUNCATED_WEIGHTS: "share in [0, 1]: tokens whose weight the correction bounds",
    REJECTED_TOKENS: "share in [0, 1]: tokens that the correction rejects",
    REJECTED_SAMPLES: "share in [0, 1]: trained samples of which it rejects every token",
    ROUTER_LOSS: "load-balancing loss of the routers; top-k where all experts are used alike, mean over the updates",
    ROUTER_VIOLATION: "load of the busiest expert over the mean load, minus 1; of the worst layer, over the step",
    GRAD_NORM: "L2 norm of the gradient before clipping, mean over the step's updates",
    CRITIC_GRAD_NORM: "the same of the critic",
    LEARNING_RATE: "learning rate of the update",
    CRITIC_LEARNING_RATE: "learning rate of the critic's update",
    UPDATES: "optimizer steps of the policy in this step",
    TRAIN_SPEED: "tokens per second: of all samples of the step, prompts included, by the time in the trainer",
    TRAIN_TFLOPS: "TFLOP/s per GPU: of the models' passes, recomputation not counted, by the time in the trainer",
    MFU: "share in [0, 1]: of the GPUs' peak rate in bfloat16 that these are; none where the peak is not known",
    SKIPPED_STEPS: "steps: that changed nothing since the start of the run: nothing to learn, or an overflow",
    NONFINITE_LOSS: "updates: of the policy in this step whose loss was not finite",
    TRAINED_TOKENS: "tokens: that the policy was trained on, those of the loss alone, once for every epoch",
    TRAINED_SAMPLES: "samples: in the update",
    DUMMY_FRACTION: "share in [0, 1]: micro-batches of the policy that are dummies, for ranks with fewer than others",
    PADDING_FRACTION: "share in [0, 1]: tokens in the policy's micro-batches that belong to no sample",
    POLICY_LAG_MEAN: "policy versions: mean of the trainer's version minus the oldest that sampled the trajectory",
    POLICY_LAG_MAX: "policy versions: largest of them",
    LAG_SPAN: "policy versions: newest minus oldest version within a sample, largest of the step",
    PROBE_DIFF_MEAN: "nats: mean |trainer - engine| on the probe prompt after the update, worst engine",
    PROBE_DIFF_MAX: "nats: largest |trainer - engine| on the probe prompt after the update",
    PUBLISH_SECONDS: "seconds: from the first call of the weight update to the last release",
    PAUSE_SECONDS: "seconds: longest time an engine was paused for the update",
    JOIN_SECONDS: "seconds: until trainer and engines had met, while nothing is paused; short without a new member",
    LOOKUP_SECONDS: "seconds: until the trainer had computed the probe prompt itself, while nothing is paused",
    SEND_SECONDS: "seconds: of the trainer's part of the transfer, its wait for engines that empty themselves included",
    TRANSFER_SECONDS: "seconds: until an engine had received and loaded the weights, slowest engine",
    COMMIT_SECONDS: "seconds: until it sampled with them, slowest engine",
    PROBE_SECONDS: "seconds: until it had computed the probe prompt, slowest engine",
    ROLLOUT_SPEED: "tokens per second: sampled, over all engines, while generating",
    ENGINE_SPEED_MIN: "tokens per second: that the slowest engine samples when it is busy, by its own count of late",
    ENGINE_SPEED_MAX: "the same of the fastest engine",
    KV_CACHE_USE: "share in [0, 1]: of a KV cache that samples took, of the fullest engine, since the step before",
    TIME_GENERATE: "seconds: sampling",
    TIME_REWARD: "seconds: scoring that was not hidden behind sampling",
    TIME_REFERENCE: "seconds: reference log-probabilities that were not hidden behind sampling and scoring",
    TIME_SLEEP: "seconds: until every engine had given its GPU memory up, where rollout.sleep_mode is set",
    TIME_TRAIN: "seconds: in the trainer",
    TIME_WAKE: "seconds: until engines that slept had it again: for weights, then the slowest one's for its KV cache",
    TIME_PUBLISH: "seconds: weight update and probe, without time/wake",
    TIME_EVALUATE: "seconds: held-out evaluation after the step",
    TIME_CHECKPOINT: "seconds: checkpoint after the step",
    TIME_OTHER: "seconds: of time/step that are in no part above: the coordinator's own work between them",
    TIME_STEP: "seconds: the whole step, evaluation and checkpoint included",
    DROPPED_SAMPLES: "samples: dropped in the step; the ledger has their reasons",
    CERTIFICATE_SECONDS: "seconds: until the first certificate of coordinator and members expires; only with TLS",
    EVAL_SCORE: "score units: mean held-out score",
    EVAL_HALF_WIDTH: "score units: half width of its 95 % interval, clustered by task group",
}

TIMES_OF_A_STEP: Final = (
    TIME_GENERATE,
    TIME_REWARD,
    TIME_REFERENCE,
    TIME_SLEEP,
    TIME_TRAIN,
    TIME_WAKE,
    TIME_PUBLISH,
    TIME_EVALUATE,
    TIME_CHECKPOINT,
)
"""Parts of a step, one after the other; TIME_OTHER is the rest of it."""
