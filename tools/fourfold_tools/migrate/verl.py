"""Lists the options of verl's `main_ppo` (FSDP, early 2026): defaults, and what becomes of each in a recipe.

Options that are many of a kind are named by `PATTERNS`. Conversions are in `verl_rules.py`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from fourfold_tools.migrate.flags import Flag, row, table_of

_ACTOR: Final = "actor_rollout_ref.actor"
_ROLLOUT: Final = "actor_rollout_ref.rollout"
_MODEL: Final = "actor_rollout_ref.model"
_CORRECTION: Final = "algorithm.rollout_correction"
_KWARGS: Final = "reward.reward_kwargs.overlong_buffer_cfg"
_FIRST_OVERLONG: Final = "reward_model.overlong_buffer"  # in DAPO's first recipe


_BATCH: Final = [
    row("data.train_batch_size", "int", 1024, "batch.prompts_per_step"),
    row(f"{_ROLLOUT}.n", "int", 1, "batch.group_size"),
    row(f"{_ACTOR}.ppo_mini_batch_size", "int", 256, "batch.mini_batches_per_step",
         "data.train_batch_size / ppo_mini_batch_size, both in prompts"),
    row(f"{_ACTOR}.ppo_epochs", "int", 1, "batch.epochs_per_step"),
    row(f"{_ACTOR}.ppo_micro_batch_size_per_gpu", "int", None, "batch.tokens_per_micro_batch",
         "samples x (max_prompt_length + max_response_length)", older=f"{_ACTOR}.ppo_micro_batch_size"),
    row(f"{_ACTOR}.use_dynamic_bsz", "bool", False, "batch.tokens_per_micro_batch",
         "micro-batches are always filled by tokens; true: up to ppo_max_token_len_per_gpu"),
    row(f"{_ACTOR}.ppo_max_token_len_per_gpu", "int", 16384, "batch.tokens_per_micro_batch",
         "x ulysses_sequence_parallel_size; with use_dynamic_bsz"),
    row(f"{_ACTOR}.ulysses_sequence_parallel_size", "int", 1, "trainer.sequence_parallel_size"),
    row("data.max_prompt_length", "int", 512, "model.max_context_tokens, data.max_prompt_tokens",
         "model.max_context_tokens: + data.max_response_length"),
    row("data.shuffle", "bool", True, "data.order", "false: file"),
    row("data.max_response_length", "int", 512, "sampling.max_new_tokens"),
    row("actor_rollout_ref.ref.log_prob_max_token_len_per_gpu", "int", None, "reference.tokens_per_batch",
         "at least 8192"),
    row("trainer.total_epochs", "int", 30, "steps", "rows x epochs / data.train_batch_size"),
    row("trainer.total_training_steps", "int", None, "steps", "before total_epochs"),
    row("data.train_max_samples", "int", -1, "data.train.size", "if above 0"),
    row("data.seed", "int", None, "seed", "None: 42"),
]  # fmt: skip

_ALGORITHM: Final = [
    row("algorithm.adv_estimator", "text", "gae", "algorithm.preset, algorithm.advantage.kind, algorithm.whiten",
         "gae: verl-ppo. Others: verl-grpo with grpo, reinforce, reinforce-baseline, remax, rloo, opo, gpg; "
         "grpo_passk: pass-at-k; optimal_token_baseline and tir_optimal_token_baseline: otb",
         values=("gae", "grpo", "grpo_vectorized", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "remax",
                 "rloo", "rloo_vectorized", "opo", "gpg", "grpo_passk", "optimal_token_baseline",
                 "tir_optimal_token_baseline")),
    row("algorithm.norm_adv_by_std_in_grpo", "bool", True, "algorithm.advantage.kind, algorithm.advantage.normalize",
         "false: dr-grpo; with grpo_passk: normalize"),
    row("algorithm.gamma", "float", 1.0, "algorithm.advantage.gamma", "with gae and reinforce_plus_plus"),
    row("algorithm.lam", "float", 1.0, "algorithm.advantage.lam", "with gae"),
    row("algorithm.use_kl_in_reward", "bool", False, "algorithm.kl.placement, algorithm.advantage.kl_in_score",
         "true: reward; with rloo as a part of the score"),
    row("algorithm.kl_penalty", "text", "kl", "algorithm.kl.estimator",
         "kl: k1. mse: k2. low_var_kl: k3. With use_kl_in_reward"),
    row("algorithm.kl_ctrl.kl_coef", "float", 0.001, "algorithm.kl.coef", "with use_kl_in_reward"),
    row("algorithm.kl_ctrl.type", "text", "fixed", "algorithm.kl.target", "adaptive: target_kl"),
    row("algorithm.kl_ctrl.horizon", "int", 10_000, "algorithm.kl.horizon", "with adaptive"),
    row("algorithm.kl_ctrl.target_kl", "float", 0.1, "algorithm.kl.target", "with adaptive"),
    row(f"{_ACTOR}.use_kl_loss", "bool", False, "algorithm.kl.placement", "true: loss"),
    row(f"{_ACTOR}.kl_loss_coef", "float", 0.001, "algorithm.kl.coef", "with use_kl_loss"),
    row(f"{_ACTOR}.kl_loss_type", "text", "low_var_kl", "algorithm.kl.estimator",
         "low_var_kl: k3. mse: k2. With + at the end: k2, whose gradient it has. kl: k2, as k1 has no gradient. With "
         "use_kl_loss"),
    row(f"{_ACTOR}.policy_loss.loss_mode", "text", "vanilla", "algorithm.loss.kind",
         "vanilla: ppo. gspo, sapo, cispo: these. geo_mean: gmpo. gpg: reinforce",
         values=("vanilla", "gspo", "sapo", "cispo", "gpg", "clip_cov", "kl_cov", "geo_mean", "bypass_mode")),
    row(f"{_ACTOR}.clip_ratio", "float", 0.2, "",
         "not needed: verl reads clip_ratio_low and clip_ratio_high, 0.2 each"),
    row(f"{_ACTOR}.clip_ratio_low", "float", 0.2, "algorithm.loss.clip_low, algorithm.loss.ratio_min",
         "cispo: ratio_min = 1 - clip_ratio_low"),
    row(f"{_ACTOR}.clip_ratio_high", "float", 0.2, "algorithm.loss.clip_high, algorithm.loss.ratio_max",
         "cispo: ratio_max = 1 + clip_ratio_high"),
    row(f"{_ACTOR}.clip_ratio_c", "float", 3.0, "algorithm.loss.dual_clip", "with vanilla"),
    row(f"{_ACTOR}.tau_pos", "float", 1.0, "algorithm.loss.tau_positive", "with sapo"),
    row(f"{_ACTOR}.tau_neg", "float", 1.05, "algorithm.loss.tau_negative", "with sapo"),
    row(f"{_ACTOR}.loss_agg_mode", "text", "token-mean", "algorithm.aggregation",
         "seq-mean-token-mean (always with gspo, sapo and geo_mean): sequence-mean. seq-mean-token-sum: sequence-sum. "
         "seq-mean-token-sum-norm: constant-length",
         values=("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")),
    row(f"{_ACTOR}.loss_scale_factor", "float", None, "",
         "no equivalent: constant-length divides by sampling.max_new_tokens"),
    row(f"{_ACTOR}.entropy_coeff", "float", 0.0, "algorithm.entropy_coef"),
    row(f"{_CORRECTION}.rollout_is", "text", None, "algorithm.correction.kind",
         "token: tis; geometric-tis with geo_mean. sequence: sequence-tis. With rollout_rs: see there"),
    row(f"{_CORRECTION}.rollout_is_threshold", "float", 2.0, "algorithm.correction.high", "with rollout_is"),
    row(f"{_CORRECTION}.rollout_rs", "text", None, "algorithm.correction.kind",
         "seq_mean_k1, geometric: sequence-mask; sequence-mask-tis with rollout_is token. seq_sum_k1, sequence: "
         "sequence-sum-mask; sequence-sum-mask-tis with rollout_is sequence. token_k1, token: icepop. token_k3, "
         "seq_mean_k2, seq_mean_k3: token-k3-mask, sequence-k2-mask, sequence-k3-mask"),
    row(f"{_CORRECTION}.rollout_rs_threshold", "any", None, "algorithm.correction.low, algorithm.correction.high",
         "with k1, LOWER_UPPER: 1 / UPPER and 1 / LOWER, as verl bounds the inverse ratio"),
    row(f"{_CORRECTION}.rollout_rs_threshold_lower", "float", None, "algorithm.correction.low",
         "None: 1 / threshold; with token, sequence, geometric of older versions"),
    row("algorithm.filter_groups.enable", "bool", False, "algorithm.filter.keep", "true: varied"),
    row("algorithm.filter_groups.metric", "text", None, "", "not needed: groups are compared by their scores"),
    row("algorithm.filter_groups.max_num_gen_batches", "int", 0, "algorithm.filter.max_rounds", "0: 1000"),
]  # fmt: skip

_MODELS: Final = [
    row(f"{_MODEL}.path", "text", "~/models/deepseek-llm-7b-chat", "model.source",
         "a name of the hub: hf:NAME"),
    row(f"{_MODEL}.enable_gradient_checkpointing", "bool", True, "trainer.gradient_checkpointing"),
    row(f"{_MODEL}.use_liger", "bool", False, "trainer.liger_kernels"),
    row(f"{_MODEL}.lora_rank", "int", 0, "trainer.lora.rank", older=f"{_MODEL}.lora.rank"),
    row(f"{_MODEL}.lora_alpha", "float", 16.0, "trainer.lora.alpha", "with lora_rank", older=f"{_MODEL}.lora.alpha"),
    row(f"{_MODEL}.target_modules", "texts", ("all-linear",), "trainer.lora.target_modules", "with lora_rank"),
    row(f"{_MODEL}.lora.merge", "bool", False, "weights.adapters", "with lora_rank; true: merged"),
    row(f"{_ACTOR}.optim.lr", "float", 1e-6, "trainer.learning_rate"),
    row(f"{_ACTOR}.optim.weight_decay", "float", 0.01, "trainer.weight_decay"),
    row(f"{_ACTOR}.optim.betas", "pair", (0.9, 0.999), "trainer.adam_betas"),
    row(f"{_ACTOR}.optim.lr_scheduler_type", "text", "constant", "trainer.schedule", "constant or cosine",
         older=f"{_ACTOR}.optim.warmup_style"),
    row(f"{_ACTOR}.optim.lr_warmup_steps", "int", -1, "trainer.warmup_steps", "below 0: lr_warmup_steps_ratio"),
    row(f"{_ACTOR}.optim.lr_warmup_steps_ratio", "float", 0.0, "trainer.warmup_steps", "share x steps"),
    row(f"{_ACTOR}.optim.min_lr_ratio", "float", 0.0, "trainer.final_learning_rate_share", "with cosine"),
    row(f"{_ACTOR}.grad_clip", "float", 1.0, "trainer.max_grad_norm"),
    row("critic.model.path", "text", None, "critic.source", "with gae"),
    row("critic.optim.lr", "float", 1e-5, "critic.learning_rate", "with gae"),
    row("critic.optim.weight_decay", "float", 0.01, "critic.weight_decay", "with gae"),
    row("critic.optim.lr_scheduler_type", "text", "constant", "critic.schedule", "with gae",
         older="critic.optim.warmup_style"),
    row("critic.optim.lr_warmup_steps", "int", -1, "critic.warmup_steps", "below 0: lr_warmup_steps_ratio"),
    row("critic.optim.lr_warmup_steps_ratio", "float", 0.0, "critic.warmup_steps", "share x steps"),
    row("critic.optim.min_lr_ratio", "float", 0.0, "critic.final_learning_rate_share", "with cosine"),
    row("critic.grad_clip", "float", 1.0, "critic.max_grad_norm", "with gae"),
    row("critic.cliprange_value", "float", 0.5, "critic.value_clip", "with gae"),
    row("trainer.critic_warmup", "int", 0, "critic.policy_starts_at_step", "at least 1; with gae"),
]  # fmt: skip

_ENGINES: Final = [
    row(f"{_ROLLOUT}.temperature", "float", 1.0, "sampling.temperature"),
    row(f"{_ROLLOUT}.top_p", "float", 1.0, "", "no equivalent below 1: importance ratios would be wrong"),
    row(f"{_ROLLOUT}.top_k", "int", -1, "", "no equivalent above 0: importance ratios would be wrong"),
    row(f"{_ROLLOUT}.over_sample_rate", "float", 0.0, "",
         "no equivalent above 0: no sample is given up for being slow; asynchrony.max_policy_lag keeps engines busy"),
    row(f"{_ROLLOUT}.ignore_eos", "bool", False, "", "no equivalent of true: a sample ends at the model's end token"),
    row(f"{_ROLLOUT}.do_sample", "bool", True, "", "no equivalent of false: see sampling.temperature"),
    row(f"{_ROLLOUT}.name", "text", None, "", "not needed: engines are vLLM"),
    row(f"{_ROLLOUT}.tensor_model_parallel_size", "int", 2, "rollout.gpus_per_replica",
         "the replicas are all GPUs divided by this"),
    row(f"{_ROLLOUT}.gpu_memory_utilization", "float", 0.5, "rollout.kv_cache_gib",
         "you choose it, as several services share a GPU's memory"),
    row(f"{_ROLLOUT}.free_cache_engine", "bool", True, "rollout.sleep_mode"),
    row(f"{_ROLLOUT}.enforce_eager", "bool", False, "rollout.enforce_eager"),
    row(f"{_ROLLOUT}.max_num_batched_tokens", "int", 8192, "rollout.max_batched_tokens", "if given"),
    row(f"{_ROLLOUT}.max_num_seqs", "int", 256, "rollout.max_concurrent_samples", "if given, at least the group"),
    row(f"{_ROLLOUT}.val_kwargs.n", "int", 1, "evaluation.samples_per_prompt", "with trainer.test_freq"),
    row(f"{_ROLLOUT}.val_kwargs.temperature", "float", 0.0, "data.eval.temperature", "with trainer.test_freq"),
    row("trainer.n_gpus_per_node", "int", 8, "trainer.ranks", "x trainer.nnodes"),
    row("trainer.nnodes", "int", 1, "trainer.ranks, placement.trainer_nodes", "nodes x GPUs per node"),
    row("actor_rollout_ref.hybrid_engine", "bool", True, "placement.colocated"),
]  # fmt: skip

_REWARD_AND_DATA: Final = [
    row("data.train_files", "texts", ("~/data/rlhf/gsm8k/train.parquet",), "data.train.path",
         "one source for each file; data.answer_field is reward_model.ground_truth"),
    row("data.val_files", "texts", ("~/data/rlhf/gsm8k/test.parquet",), "data.eval.path", "with trainer.test_freq"),
    row("data.prompt_key", "text", "prompt", "data.prompt_field"),
    row("custom_reward_function.path", "text", None, "reward.function", "FILE:NAME, with an adapter",
         older="reward.custom_reward_function.path"),
    row("custom_reward_function.name", "text", "compute_score", "reward.function", "FILE:NAME, with an adapter",
         older="reward.custom_reward_function.name"),
    row("reward_model.enable", "bool", False, "reward.model.source", "true: a reward model",
         older="reward.reward_model.enable"),
    row("reward_model.model.path", "text", "~/models/FsfairX-LLaMA3-RM-v0.1", "reward.model.source",
         "with reward_model.enable", older="reward.reward_model.model_path"),
    row("reward_model.enable_resource_pool", "bool", False, "reward.model.own_gpus", "with reward_model.enable",
         older="reward.reward_model.enable_resource_pool"),
    row("reward_model.reward_manager", "text", "naive", "", "not needed: a reward service scores each group"),
    row("reward_model.reward_kwargs.overlong_buffer_cfg.enable", "bool", False, "algorithm.shaping.overlong_buffer",
         "false: 0", older=f"{_KWARGS}.enable {_FIRST_OVERLONG}.enable"),
    row("reward_model.reward_kwargs.overlong_buffer_cfg.len", "float", 0.0, "algorithm.shaping.overlong_buffer",
         "as a share of sampling.max_new_tokens", older=f"{_KWARGS}.len {_FIRST_OVERLONG}.len"),
    row("reward_model.reward_kwargs.overlong_buffer_cfg.penalty_factor", "float", 1.0,
         "algorithm.shaping.overlong_penalty", older=f"{_KWARGS}.penalty_factor {_FIRST_OVERLONG}.penalty_factor"),
]  # fmt: skip

_RUN: Final = [
    row("trainer.experiment_name", "text", None, "name", "letters, digits, _ and -"),
    row("trainer.logger", "texts", ("console", "wandb"), "logging.sinks", "tensorboard, wandb, trackio and mlflow"),
    row("trainer.project_name", "text", "verl_examples", "logging.project", "with a tracker"),
    row("trainer.save_freq", "int", -1, "checkpoint.every_steps", "-1: 10, because every run can be resumed"),
    row("trainer.max_actor_ckpt_to_keep", "int", None, "checkpoint.keep", "if given"),
    row("trainer.test_freq", "int", -1, "evaluation.every_steps", "-1: no evaluation"),
    row("trainer.val_before_train", "bool", True, "",
         "no equivalent of false: held-out sets are always evaluated before the first step, too"),
    row("trainer.val_only", "bool", False, "", "no equivalent of true: fourfold eval evaluates and trains nothing"),
]  # fmt: skip

TABLE: Final[Mapping[str, Flag]] = table_of([*_BATCH, *_ALGORITHM, *_MODELS, *_ENGINES, *_REWARD_AND_DATA, *_RUN])

_SAME_RANKS: Final = "not needed: policy, critic and reference are divided alike"
_PACKED: Final = "not needed: micro-batches are filled by tokens"
PATTERNS: Final[tuple[tuple[re.Pattern[str], str], ...]] = tuple(
    (re.compile(pattern), reason)
    for pattern, reason in (
        (r"(^|\.)megatron(\.|$)", "no equivalent: ZeRO stage 3 divides the model; see trainer.sequence_parallel_size"),
        (r"(^|\.)(global_)?profiler\.|^trainer\.(profile_steps|rollout_data_dir|validation_data_dir|log_val_generations)",
         "not needed: every step has its times in metrics.jsonl, and its samples in samples.jsonl"),
        (r"(param|optimizer|grad)_offload$|offload_policy$",
         "not needed: the trainer frees GPU memory between steps where it shares; trainer.offload goes further"),
        (r"fsdp_config\.|\.strategy$|\.fsdp_size$|use_torch_compile$|layered_summon$|load_(format|weight)$|nccl_timeout$|"
         r"use_shm$",
         "not needed: an option of FSDP, or of how verl loads its workers; the trainer is DeepSpeed ZeRO-3"),
        (r"use_remove_padding$", "not needed: samples are always packed, without padding"),
        (r"use_fused_kernels$|fused_kernel_options|use_prefix_grouper$|chunking$|entropy_checkpointing$|tiled_mlp|"
         r"enable_activation_offload$|sum_pi_squared", "not needed: log-probabilities and entropy take little memory"),
        (r"(micro_batch_size(_per_gpu)?|use_dynamic_bsz|max_token_len_per_gpu)$", _PACKED),
        (r"^(critic|reward_model|actor_rollout_ref\.ref)\..*sequence_parallel_size$", _SAME_RANKS),
        (r"^(actor_rollout_ref\.ref|critic)\.(rollout_n|ppo_mini_batch_size|ppo_epochs|shuffle|loss_agg_mode|enable)$",
         _SAME_RANKS),
        (r"^critic\.model\.(enable_gradient_checkpointing|lora_|lora\.|target_modules)",
         "not needed: the critic has gradient checkpointing as the policy, and is trained whole"),
        (r"freeze_vision_tower|^data\.(image|video)_|multi_modal|limit_images",
         "no equivalent: models read text alone"),
        (r"trust_remote_code$|external_lib$", "no equivalent: code in a model folder is never run"),
        (r"(tokenizer_path|hf_config_path|input_tokenizer|tokenizer)$", "not needed: the tokenizer is the model's"),
        (r"override_config|custom_chat_template|torch_dtype$",
         "no equivalent: change config.json of the model's folder"),
        (r"exclude_modules$|lora_adapter_path$|model\.lora\.(a2a_experimental|adapter_path|dropout(_position)?|dtype|"
         r"freeze_\w+|lora_[AB]_init_method|target_modules|type)$",
         "no equivalent: LoRA begins anew, without dropout, on linear layers by their names in transformers"),
        (r"\.mtp(\.|$)|router_replay|routing_replay", "no equivalent: multi-token prediction and router replay"),
        (r"calculate_(log_probs|entropy)$", "not needed: every token has its log-probability, every step its entropy"),
        (r"policy_loss\.(_target_|clip_cov_\w+|kl_cov_ratio|ppo_kl_coef)$|prefix_grouper|^algorithm\.(pf_ppo|use_pf_ppo)",
         "no equivalent: this loss is not part of Fourfold"),
        (r"rollout_correction\.(bypass_mode|loss_type|rollout_is_batch_normalize)$",
         "no equivalent: see algorithm.correction"),
        (r"\.optim\.(_target_|betas|clip_grad|lr_decay_(steps|style)|lr_warmup_init|lr_wsd_decay_(steps|style)|min_lr|"
         r"num_cycles|optimizer(_impl)?|override_optimizer_config(\..+)?|total_training_steps|"
         r"use_checkpoint_opt_param_scheduler|weight_decay_incr_style)$",
         "no equivalent: AdamW, or Muon with trainer.optimizer; schedules are constant, linear and cosine"),
        (r"rollout\.multi_turn\.|rollout\.agent\.|tool_config_path",
         "no equivalent: write the tools as an environment (docs/agents.md)"),
        (r"rollout\.engine_kwargs", "no equivalent: write options of vLLM to [rollout.vllm]"),
        (r"val_kwargs\.(_target_|do_sample|top_k|top_p)$",
         "no equivalent: data.eval has temperature and max_new_tokens alone"),
        (r"^(reward\.)?custom_reward_function\.reward_kwargs|^reward\.compute_score_kwargs",
         "no equivalent: write these arguments into the adapter of reward.function"),
        (r"^(reward\.)?reward_manager(\.|$)|^reward\.(num_workers$|sandbox_fusion\.)|^reward(_model)?\.reward_kwargs\."
         r"(?!overlong_buffer_cfg\.(?!log$))|^(reward\.)?reward_model\.(rollout\.|sandbox_fusion\.|reward_loop|"
         r"(launch_reward_fn_async|max_length|n_gpus_per_node|nnodes|num_workers|use_reward_loop)$)",
         "not needed: a reward service has its own options (docs/rewards.md)"),
        (r"^actor_rollout_ref\.rollout\.((checkpoint_engine|layer_name_map|prometheus|trace)\.|(_target_|"
         r"cudagraph_capture_sizes|data_parallel_size|disable_log_stats|dtype|enable_chunked_prefill|"
         r"enable_prefix_caching|expert_parallel_size|logprobs_mode|max_model_len|mode|multi_stage_wake_up|"
         r"pipeline_model_parallel_size|prompt_length|quantization(_config_file)?|response_length|"
         r"scheduling_policy|skip_(dump_dir|rollout|tokenizer_init))$)",
         "not needed: an engine's option that Fourfold sets itself"),
        (r"checkpoint\.|^trainer\.(resume|default_local_dir|default_hdfs_dir|del_local|max_critic|esi_)",
         "not needed: runs/NAME/checkpoints has all that a run needs; fourfold run --resume runs/NAME"),
        (r"^trainer\.(use_legacy|balance_batch|device|ray_wait)|^ray_kwargs|^transfer_queue",
         "not needed: an option of verl's workers or of Ray; batches are always balanced among ranks"),
        (r"^data\.(dataloader|filter_overlong|truncation|return_|reward_fn_key|val_batch_size|val_max_samples|validation_shuffle|sampler|datagen|"
         r"custom_cls|gen_batch_size)", "not needed: all prompts are tokenized first, and those without room left out"),
        (r"^data\.apply_chat_template_kwargs", "no equivalent: change the chat template of the model's folder"),
        (r"data_loader_seed$|\.shuffle$|full_determinism$|rollout_n$",
         "not needed: `seed` fixes the order of all samples"),
        (r"_target_$|^hydra\.|^defaults", "not needed: it belongs to Hydra"),
    )
)  # fmt: skip
"""Reasons of options by a pattern that their name has; the first one counts."""
