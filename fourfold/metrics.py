"""Defines the name, unit and meaning of every metric of a step.

A line of `runs/NAME/metrics.jsonl` is one step: a JSON object with these names, and with `step`, `end_time` (text: UTC
time at which the step ended), `diagnosis` (text: the problems of the step; empty if none), `alarms` (those problems
that were logged), `lag_change` (text: change of the policy lag limit after the step, with its reason; empty if none)
and `scorers` (scored samples by table [[reward]] and name@version). `scorers/NAME/mean`, `/std`, `/samples` and
`/part/COMPONENT` are of the terms of the score, before their weights, `/cost_usd` of the whole run;
`shadows/NAME/...` compares a shadow. With named sources of prompts, `data/SOURCE/reward` is the mean score of each, and
`data/SOURCE/share` its share of the groups. `eval/NAME/score`, `/half_width`, `/pass_at_K` and `/maj_at_K`, and of rows
`/loss` and `/accuracy`, are of the held-out set NAME (docs/evaluation.md). The trainer sends its part in
`TrainStepResponse.metrics` under the same names. docs/reference/metrics.md defines the tokens that metrics of tokens
cover. Only a loss of another distribution has metrics that are not in `METRICS`: it names its own.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Final

REWARD_MEAN: Final = "reward/mean"
REWARD_STD: Final = "reward/std"
REWARD_MIN: Final = "reward/min"
REWARD_MAX: Final = "reward/max"
SCORE_MEAN: Final = "score/mean"
SCORE_STD: Final = "score/std"
SCORE_ACCURACY: Final = "score/accuracy"
ABSTAIN_COUNT: Final = "score/abstain_count"
USEFUL_GROUPS: Final = "groups/useful"
GROUPS_ALL_MAX: Final = "groups/all_max"
GROUPS_ALL_MIN: Final = "groups/all_min"
GROUPS_STD: Final = "groups/std_mean"
FILTER_ACCEPT_RATE: Final = "groups/filter_accept_rate"
PROMPTS_CONSUMED: Final = "groups/prompts_consumed"
PROMPTS_SKIPPED: Final = "groups/prompts_skipped"
RESPONSE_LENGTH: Final = "length/response_mean"
RESPONSE_LENGTH_P95: Final = "length/response_p95"
RESPONSE_LENGTH_MAX: Final = "length/response_max"
TOTAL_LENGTH: Final = "length/total_mean"
TURNS: Final = "length/turns_mean"
TRUNCATION_RATE: Final = "length/truncation_rate"
NO_ACTION_RATE: Final = "length/no_action_rate"
NLL: Final = "loss/nll"
PAIR_ACCURACY: Final = "pair/accuracy"
PAIR_MARGIN: Final = "pair/margin"
PAIR_CHOSEN_REWARD: Final = "pair/chosen_reward"
PAIR_REJECTED_REWARD: Final = "pair/rejected_reward"
PAIR_CHOSEN_LOGPROB: Final = "pair/chosen_logprob"
PAIR_REJECTED_LOGPROB: Final = "pair/rejected_logprob"
PAIR_LENGTH_DIFFERENCE: Final = "pair/length_difference"
PAIR_NLL: Final = "pair/chosen_nll"
PAIR_NOISE: Final = "pair/noise"
KTO_DISTANCE: Final = "kto/distance"
KTO_ACCURACY: Final = "kto/accuracy"
KTO_MARGIN: Final = "kto/margin"
POLICY_LOSS: Final = "policy/loss"
APPROX_KL: Final = "policy/approx_kl"
APPROX_KL_K1: Final = "policy/approx_kl_k1"
CLIP_FRACTION_LOW: Final = "policy/clip_fraction_low"
CLIP_FRACTION_HIGH: Final = "policy/clip_fraction_high"
DUAL_CLIP_FRACTION: Final = "policy/dual_clip_fraction"
RATIO_MEAN: Final = "policy/ratio_mean"
RATIO_MIN: Final = "policy/ratio_min"
RATIO_MAX: Final = "policy/ratio_max"
LOGPROB_NOISE: Final = "policy/logprob_noise"
LATER_NOISE: Final = "policy/logprob_noise_later_epochs"
LATER_SAMPLE_NOISE: Final = "policy/sample_noise_later_epochs"
ENTROPY: Final = "policy/entropy"
ENTROPY_COVERED: Final = "policy/entropy_covered_fraction"
COVERED: Final = "policy/covered_fraction"
KL_LOSS: Final = "kl/loss"
REFERENCE_KL: Final = "kl/ref"
REWARD_KL: Final = "kl/reward"
TEACHER_KL: Final = "distill/kl"
TEACHER_MASS: Final = "distill/mass"
KL_CLAMPED: Final = "kl/clamped_fraction"
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
MISMATCH_COVERED: Final = "mismatch/covered_fraction"
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
SHADOW_COSINE: Final = "shadow/gradient_cosine"
SHADOW_NORM: Final = "shadow/gradient_norm"
SHADOW_LIVE_NORM: Final = "shadow/live_gradient_norm"
SHADOW_SECONDS: Final = "shadow/seconds"
LEARNING_RATE: Final = "train/lr"
CRITIC_LEARNING_RATE: Final = "train/critic_lr"
UPDATES: Final = "train/updates"
GPU_PEAK: Final = "train/gpu_peak_gib"
GPU_RESERVED: Final = "train/gpu_reserved_gib"
TRAIN_SPEED: Final = "train/tokens_per_second"
TRAIN_TFLOPS: Final = "train/tflops_per_second"
MFU: Final = "train/mfu"
SKIPPED_STEPS: Final = "train/skipped_steps"
NONFINITE_LOSS: Final = "train/nonfinite_loss"
DATA_PASS: Final = "data/pass"
DATA_TOKENS: Final = "data/tokens"
DATA_LOSS_TOKENS: Final = "data/loss_tokens"
TRAINED_TOKENS: Final = "train/tokens_per_step"
TRAINED_SAMPLES: Final = "train/samples_per_step"
TRAINED_SEGMENTS: Final = "train/segments_per_sample"
TRAINED_TURNS: Final = "train/turns_per_sample"
DUMMY_FRACTION: Final = "train/dummy_fraction"
PADDING_FRACTION: Final = "train/padding_fraction"
POLICY_LAG_MEAN: Final = "train/policy_lag_mean"
POLICY_LAG_MAX: Final = "train/policy_lag_max"
LAG_SPAN: Final = "train/lag_span"
TOKEN_LAG_MEAN: Final = "async/token_lag_mean"
TOKEN_LAG_P95: Final = "async/token_lag_p95"
TOKEN_LAG_MAX: Final = "async/token_lag_max"
LAG_LIMIT: Final = "async/lag_limit"
TRAINER_WAIT: Final = "async/trainer_wait_fraction"
ROLLOUT_WAIT: Final = "async/rollout_wait_fraction"
STALE_TOKENS: Final = "async/stale_token_fraction"
LENGTH_BIAS: Final = "async/length_bias"
GROUPS_RUNNING: Final = "async/groups_running"
GROUPS_READY: Final = "async/groups_ready"
TASKS_WAITING: Final = "agents/tasks_waiting"
TASKS_LEASED: Final = "agents/tasks_leased"
TASKS_TAKEN: Final = "agents/tasks_taken"
TASKS_RELEASED: Final = "agents/tasks_released"
TASKS_EXPIRED: Final = "agents/tasks_expired"
TASKS_REFUSED: Final = "agents/tasks_refused"
PROBE_DIFF_MEAN: Final = "weights/probe_diff_mean"
PROBE_DIFF_MAX: Final = "weights/probe_diff_max"
PUBLISH_SECONDS: Final = "weights/publish_seconds"
SAMPLING_SECONDS: Final = "weights/sampling_seconds"
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
ENGINE_STEP_BASE: Final = "rollout/step_base_seconds"
ENGINE_STEP_SAMPLE: Final = "rollout/step_sample_seconds"
ENGINE_STEP_CONTEXT: Final = "rollout/step_context_seconds"
KV_CACHE_USE: Final = "rollout/kv_cache_use_max"
CONTINUED_TOKENS: Final = "rollout/continued_tokens"
LOST_TOKENS: Final = "rollout/lost_tokens"
TIME_ROWS: Final = "time/rows"
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
EVAL_VERSION_MIN: Final = "eval/policy_version_min"
EVAL_VERSION_MAX: Final = "eval/policy_version_max"

METRICS: Final[dict[str, str]] = {
    # Rewards, groups and lengths are measured on all generated samples, before [algorithm.filter]. The filter keeps
    # prompts of medium difficulty, so that a pass rate after it would hardly depend on the policy.
    REWARD_MEAN: "score units: mean score of all samples generated for the step, before filter and penalties",
    REWARD_STD: "score units: standard deviation of these scores",
    REWARD_MIN: "score units: lowest of these scores",
    REWARD_MAX: "score units: highest of these scores",
    SCORE_MEAN: "score units: mean score of the samples sent to the trainer, after the filter, before penalties; where "
    "a reward model is trained, of the scores that it gave the samples, or steps, of the updates",
    SCORE_STD: "score units: standard deviation of the scores that a reward model gave the samples of the updates",
    SCORE_ACCURACY: "share in [0, 1]: pairs of the updates whose preferred answer got the greater score; of labelled "
    "steps, those whose score is above 0 where the label is above 0.5, and not above 0 elsewhere",
    ABSTAIN_COUNT: "samples: number on which the scorer abstained",
    USEFUL_GROUPS: "share in [0, 1]: groups whose scores, with rewards of turns, differ, of all before the filter",
    GROUPS_ALL_MAX: "share in [0, 1]: groups in which every sample has the step's highest score, before the filter",
    GROUPS_ALL_MIN: "share in [0, 1]: groups in which every sample has the step's lowest score, before the filter",
    GROUPS_STD: "score units: standard deviation of the scores within a group, mean over groups, before the filter",
    FILTER_ACCEPT_RATE: "share in [0, 1]: generated groups that filter and selection kept; 1 without both",
    PROMPTS_CONSUMED: "prompts: number drawn for the step, including those of filtered and lost groups",
    PROMPTS_SKIPPED: "prompts: number skipped by data.curriculum while those of the step were drawn",
    RESPONSE_LENGTH: "tokens: mean length of a completion, before the filter",
    RESPONSE_LENGTH_P95: "tokens: 95th percentile of the lengths of completions, before the filter",
    RESPONSE_LENGTH_MAX: "tokens: length of the longest completion, before the filter",
    TOTAL_LENGTH: "tokens: mean length of a sample with prompt and all turns, before the filter",
    TURNS: "turns: mean number of completions in a sample, before the filter",
    TRUNCATION_RATE: "share in [0, 1]: completions that were ended by a limit, before the filter",
    NO_ACTION_RATE: "share in [0, 1]: samples without a sampled token, before the filter",
    POLICY_LOSS: "minimised policy loss, aggregated as in the recipe; mean over the updates of the step",
    NLL: "nats per token: mean negative log-likelihood of the tokens of the updates, without weights",
    PAIR_ACCURACY: "share in [0, 1]: pairs of the updates whose preferred answer has the greater reward",
    PAIR_MARGIN: "mean reward of the preferred answer less that of the other; the reward is what the loss compares",
    PAIR_CHOSEN_REWARD: "mean reward of the preferred answers",
    PAIR_REJECTED_REWARD: "mean reward of the other answers",
    PAIR_CHOSEN_LOGPROB: "nats: mean summed log-probability of the preferred answers, before each update",
    PAIR_REJECTED_LOGPROB: "nats: the same of the other answers",
    PAIR_LENGTH_DIFFERENCE: "tokens: mean length of the preferred answers less that of the others",
    PAIR_NLL: "nats per token: term of algorithm.sft_coef, without it; mean over the updates of the step",
    PAIR_NOISE: "nats: by how much other samples in its micro-batch change the summed log-probability of an answer of "
    "one pair, before any weight has changed; one step in 200",
    KTO_DISTANCE: "nats: mean log-ratio of policy and reference over answers of other prompts, at least 0",
    KTO_MARGIN: "mean reward of an answer less that of kto/distance, of the other sign where it is undesirable",
    KTO_ACCURACY: "share in [0, 1]: answers of the updates on the side of kto/distance that their label asks for",
    APPROX_KL: "nats per token: k3 estimate of KL(old || current) over the tokens of the updates",
    APPROX_KL_K1: "nats per token: k1 estimate of KL(old || current); may be negative",
    CLIP_FRACTION_LOW: "share in [0, 1]: tokens of the updates with A below 0 that the loss clips or leaves out",
    CLIP_FRACTION_HIGH: "share in [0, 1]: tokens of the updates with A above 0 that the loss clips or leaves out",
    DUAL_CLIP_FRACTION: "share in [0, 1]: tokens of the updates whose loss is bounded by the dual clip",
    RATIO_MEAN: "mean importance ratio (current to old policy) of the tokens of the updates",
    RATIO_MIN: "smallest importance ratio of a token of the updates",
    RATIO_MAX: "largest importance ratio of a token of the updates",
    LOGPROB_NOISE: "nats: largest |current - old log-probability| of a token in the first update, before any weight "
    "has changed: rounding alone; absent where no pass of its own computes the old ones",
    LATER_NOISE: "nats: the same in micro-batches of the second epoch, computed before any weight has changed; one "
    "micro-batch of each rank in the first step that trains the policy and every 200th after it; absent if later "
    "epochs have the micro-batches of the first",
    LATER_SAMPLE_NOISE: "nats: largest |mean difference over a sample| of these tokens, which GSPO clips",
    ENTROPY: "nats: mean entropy of the policy at the sampling temperature; over all sampled tokens, by the weights "
    "before the step, if a pass on GPUs before the updates covers the batch; else over the tokens of the updates",
    ENTROPY_COVERED: "share in [0, 1]: tokens that policy/entropy covers, of the sampled ones that no grammar forced",
    COVERED: "share in [0, 1]: tokens of the updates, of the sampled ones that no grammar forced",
    KL_LOSS: "nats: KL term of the loss without its coefficient; mean over the updates of the step",
    REFERENCE_KL: "nats per token: k3 estimate of KL(old || reference), over the tokens of the updates",
    REWARD_KL: "nats per token: KL estimate that is subtracted from the rewards, without its coefficient",
    TEACHER_KL: "nats per token: mean of o - f, an estimate of the KL divergence to the teacher before the step; with "
    "loss.kind = `distill`, mean divergence over the tokens of the updates, without weights",
    TEACHER_MASS: "share in [0, 1]: mean probability of the loss's top_k tokens under the teacher",
    KL_CLAMPED: "share in [0, 1]: tokens of the updates whose KL term of the loss is at its bound, and without a "
    "gradient unless algorithm.kl has importance_weighted or k3_max = 0",
    KL_COEF: "coefficient of the KL term in this step",
    ADVANTAGE_MEAN: "mean advantage of the tokens in the loss",
    ADVANTAGE_STD: "standard deviation of the advantages of the tokens in the loss",
    ADVANTAGE_ABSMAX: "largest absolute advantage of a token in the loss",
    REWARD_PENALTY: "score units: mean change of a score by shaping; penalties are negative",
    VALUE_LOSS: "score units squared: loss of the critic",
    VALUE_CLIP_FRACTION: "share in [0, 1]: tokens whose value loss uses the clipped value",
    EXPLAINED_VARIANCE: "share, at most 1: variance of the returns that the critic predicts; negative: harmful",
    RETURN_MEAN: "score units: mean return, the target of the critic",
    MISMATCH_MEAN: "nats: logprob mismatch (engine versus trainer before the update), mean |old - behavior|, of all "
    "tokens with an old log-probability, as in all metrics up to mismatch/ess",
    MISMATCH_MAX: "nats: logprob mismatch (engine versus trainer), largest |difference|",
    MISMATCH_P99: "nats: logprob mismatch (engine versus trainer), 99th percentile of |difference|",
    MISMATCH_PROBABILITY: "mean |trainer probability - engine probability|",
    MISMATCH_KL: "nats per token: k3 estimate of KL(engine || trainer)",
    MISMATCH_KL_K1: "nats per token: k1 estimate of KL(engine || trainer)",
    MISMATCH_CHI2: "mean squared probability ratio of trainer to engine, minus 1",
    MISMATCH_COVERED: "share in [0, 1]: tokens that the mismatch covers, of the sampled ones that no grammar forced",
    MISMATCH_NONFINITE: "tokens: number with an engine logprob that is not finite; the other metrics here ignore them",
    EFFECTIVE_SAMPLE_SIZE: "share in (0, 1]: effective share of the tokens, weighted by the ratio of mismatch/chi2",
    CORRECTION_WEIGHT: "mean weight of a token of the updates in the correction; rejected tokens have weight 0",
    CORRECTION_WEIGHT_MIN: "smallest weight of a token that is not rejected",
    CORRECTION_WEIGHT_MAX: "largest weight of a token that is not rejected",
    TRUNCATED_WEIGHTS: "share in [0, 1]: tokens of the updates whose weight is bounded by the correction",
    REJECTED_TOKENS: "share in [0, 1]: tokens of the updates that are rejected by the correction",
    REJECTED_SAMPLES: "share in [0, 1]: samples of the updates of which every token is rejected by the correction",
    ROUTER_LOSS: "load-balancing loss of the routers, mean over the updates; top-k if all experts are used equally",
    ROUTER_VIOLATION: "load of the busiest expert divided by the mean load, minus 1, in the worst layer of the step",
    GRAD_NORM: "L2 norm of the policy's gradient before clipping, mean over the updates of the step",
    CRITIC_GRAD_NORM: "L2 norm of the critic's gradient before clipping, mean over the updates of the step",
    SHADOW_COSINE: "cosine of the policy's gradients by live and by shadow scores, same batch, before the first update",
    SHADOW_NORM: "L2 norm of the policy's gradient that the shadow scores produce",
    SHADOW_LIVE_NORM: "L2 norm of the policy's gradient that the live scores produce, before clipping",
    SHADOW_SECONDS: "seconds: time that the comparison of gradients adds to the step; part of time/train",
    LEARNING_RATE: "learning rate of the policy in this step",
    CRITIC_LEARNING_RATE: "learning rate of the critic in this step",
    UPDATES: "optimizer steps of the policy in this step",
    GPU_PEAK: "GiB: most that tensors took on a GPU of the trainer since the step before, fullest GPU; absent on CPU",
    GPU_RESERVED: "GiB: the same with freed memory that PyTorch keeps for later tensors; absent on CPU",
    TRAIN_SPEED: "tokens per second: tokens of all samples with prompts, divided by the time in the trainer",
    TRAIN_TFLOPS: "TFLOP/s per GPU: passes of the models without recomputation, divided by the time of "
    "the whole step in the trainer",
    MFU: "share in [0, 1]: train/tflops_per_second of the GPU's peak in dense bfloat16; absent if the peak is unknown",
    SKIPPED_STEPS: "steps: number since the start of the run that changed no weights: nothing to learn, or an overflow",
    NONFINITE_LOSS: "updates: number in this step whose policy loss was not finite",
    DATA_PASS: "passes over the rows of the data since the start of the run; with weights, by the number of rows alone",
    DATA_TOKENS: "tokens: number of the step's rows, prompts included",
    DATA_LOSS_TOKENS: "tokens: number of the step's rows that are in the loss",
    TRAINED_TOKENS: "tokens: number in the loss of the policy, counted once per epoch",
    TRAINED_SAMPLES: "samples: number in the update; a trajectory of several segments is one",
    TRAINED_SEGMENTS: "segments: mean number of a sample sent to the trainer; above 1 where agents edit their history",
    TRAINED_TURNS: "turns: mean number of a sample sent to the trainer, over all of its segments",
    DUMMY_FRACTION: "share in [0, 1]: dummy micro-batches of the policy, on ranks with fewer micro-batches than others",
    PADDING_FRACTION: "share in [0, 1]: padding tokens in the micro-batches of the policy",
    POLICY_LAG_MEAN: "policy versions: trainer's version minus the oldest that sampled a trajectory, mean",
    POLICY_LAG_MAX: "policy versions: trainer's version minus the oldest that sampled a trajectory, largest",
    LAG_SPAN: "policy versions: newest minus oldest version that sampled a trajectory, largest",
    TOKEN_LAG_MEAN: "policy versions: trainer's version minus the one that sampled a token, mean over trained tokens",
    TOKEN_LAG_P95: "policy versions: trainer's version minus the one that sampled a token, 95th percentile",
    TOKEN_LAG_MAX: "policy versions: trainer's version minus the one that sampled a token, largest",
    LAG_LIMIT: "policy versions: largest lag that new groups may reach; below asynchrony.max_policy_lag if lowered",
    TRAINER_WAIT: "share in [0, 1]: time of the step in which the trainer waited for samples",
    ROLLOUT_WAIT: "share in [0, 1]: time of the step in which engines had room, and the lag limit admitted no prompt",
    STALE_TOKENS: "share in [0, 1]: tokens dropped as stale, of all tokens sampled since the step before",
    LENGTH_BIAS: "mean length of the completions trained since the start, divided by that of all scored ones, minus 1",
    GROUPS_RUNNING: "groups: number in generation or scoring when the step's batch was complete",
    GROUPS_READY: "groups: number that were ready for a later step when the step's batch was complete",
    TASKS_WAITING: "tasks: number that wait for an agent when the step's batch was complete",
    TASKS_LEASED: "tasks: number that agents work on when the step's batch was complete",
    TASKS_TAKEN: "tasks: number whose trajectory was stored since the step before",
    TASKS_RELEASED: "tasks: number that agents gave up since the step before",
    TASKS_EXPIRED: "tasks: number whose lease or time ended without a trajectory since the step before",
    TASKS_REFUSED: "tasks: number of trajectories refused since the step before, because they break the contract",
    PROBE_DIFF_MEAN: "nats: logprob mismatch on the probe prompt after the update, mean |difference|, worst engine",
    PROBE_DIFF_MAX: "nats: logprob mismatch on the probe prompt after the update, largest |difference|",
    PUBLISH_SECONDS: "seconds: from the first call of the weight update to the release of the last engine",
    SAMPLING_SECONDS: "seconds: from the first call of the weight update until the last engine samples with them",
    PAUSE_SECONDS: "seconds: longest pause of an engine for the update",
    JOIN_SECONDS: "seconds: connecting trainer and engines while engines run; short without a new member",
    LOOKUP_SECONDS: "seconds: the trainer's computation of the probe prompt while engines sample, tokens held back",
    SEND_SECONDS: "seconds: the trainer's part of the transfer, including its wait for engines to finish samples",
    TRANSFER_SECONDS: "seconds: receiving and loading the weights, slowest engine",
    COMMIT_SECONDS: "seconds: from loading the weights to sampling with them, slowest engine",
    PROBE_SECONDS: "seconds: an engine's computation of the probe prompt, slowest engine",
    ROLLOUT_SPEED: "tokens per second: sampled by all engines together while generating",
    ENGINE_SPEED_MIN: "tokens per second: recent rate of the slowest engine while it is busy, by its own count",
    ENGINE_SPEED_MAX: "tokens per second: recent rate of the fastest engine while it is busy, by its own count",
    ENGINE_STEP_BASE: "seconds: part of an engine step that is the same for any number of samples, fitted, mean engine",
    ENGINE_STEP_SAMPLE: "seconds: part of an engine step per running sample, fitted, mean engine",
    ENGINE_STEP_CONTEXT: "seconds: part of an engine step per token in the KV cache, fitted, mean engine",
    KV_CACHE_USE: "share in [0, 1]: peak use of the KV cache since the last step, fullest engine",
    CONTINUED_TOKENS: "tokens: sampled in calls that ended early, and kept; absent if none",
    LOST_TOKENS: "tokens: sent by engines and in no sample, as after a bad response; absent if none",
    TIME_ROWS: "seconds: wait for the rows of the step, which are read in advance",
    TIME_GENERATE: "seconds: sampling",
    TIME_REWARD: "seconds: scoring that is not hidden behind sampling",
    TIME_REFERENCE: "seconds: reference log-probabilities that are not hidden behind sampling and scoring",
    TIME_SLEEP: "seconds: until all engines have freed their GPU memory, with rollout.sleep_mode",
    TIME_TRAIN: "seconds: training step in the trainer",
    TIME_WAKE: "seconds: until all engines have their GPU memory back, for weights and for the KV cache",
    TIME_PUBLISH: "seconds: weight update and probe, without time/wake; engines sample again before its end",
    TIME_EVALUATE: "seconds: held-out evaluation after the step",
    TIME_CHECKPOINT: "seconds: checkpoint after the step",
    TIME_OTHER: "seconds: rest of time/step: the coordinator's own work",
    TIME_STEP: "seconds: whole step, including evaluation and checkpoint",
    DROPPED_SAMPLES: "samples: number dropped in the step; the ledger has the reasons",
    CERTIFICATE_SECONDS: "seconds: until the first certificate of coordinator or members expires; only with TLS",
    EVAL_SCORE: "score units: mean held-out score, of rows as evaluation.metric says; of several sets: mean of theirs",
    EVAL_HALF_WIDTH: "score units: half width of the 95 % interval of eval/score, clustered by task group",
    EVAL_VERSION_MIN: "policy versions: lowest one that sampled a token of a held-out answer",
    EVAL_VERSION_MAX: "policy versions: highest one; above that of the step if no engine kept its weights",
}

TIMES_OF_A_STEP: Final = (
    TIME_ROWS,
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
"""Consecutive parts of a step; `TIME_OTHER` is the rest."""

MAIN: Final = {
    REWARD_MEAN: "reward",
    NLL: "loss",
    SCORE_ACCURACY: "accuracy",
    PAIR_ACCURACY: "accuracy",
    KTO_ACCURACY: "accuracy",
}
"""The metric that stands for a step is the first of these that it has; its name for users."""


def main_metric(values: Container[str]) -> str:
    """Return the metric of a step that stands for it, a key of `MAIN`: the mean reward if the step has none."""
    return next((name for name in MAIN if name in values), REWARD_MEAN)
