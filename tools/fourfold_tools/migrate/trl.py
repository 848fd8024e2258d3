"""Lists the options of TRL's GRPO (GRPOConfig of TRL 1.9 with its script, model and data options): defaults, and what
becomes of each in a recipe. Conversions are in `trl_rules.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from fourfold_tools.migrate.flags import Flag, row, table_of
from fourfold_tools.migrate.flags import unconverted as _none

_NUCLEUS: Final = "no equivalent: the engine would renormalise, and importance ratios would be wrong; use temperature"
_TRANSFORMERS: Final = "not needed: completions come from vLLM engines"
_SERVER: Final = "not needed: engines register with the coordinator"
_TRACKER: Final = "no equivalent of this name: write the trackers to logging.sinks"
_LOGGED: Final = "not needed: every step is in metrics.jsonl, and every completion in samples.jsonl"
_HUB: Final = "no equivalent: a run uploads nothing; afterwards, fourfold export runs/NAME --push OWNER/NAME does"
_ADAPTIVE: Final = "no equivalent: entropy_coef is constant"
_SYNC: Final = "no equivalent: the reference is frozen; begin a new run from the exported model"
_BNB: Final = "no equivalent: weights are trained in bfloat16 or float32"
_OPTIMIZER: Final = "no equivalent: AdamW, or Muon with trainer.optimizer"
_LOADER: Final = "not needed: prompts are tokenized once, at the start"
_FSDP: Final = "no equivalent: use trainer.zero_stage = 3"
_TORCH: Final = "not needed: an option of torch that Fourfold sets itself, or of another machine"
_ACCELERATE: Final = "not needed: an option of accelerate's launcher; the services start their own processes"
_OPEN_R1: Final = "no equivalent: an option of open-r1's rewards; write it into the reward function"
_EVALUATION: Final = "not needed: evaluations have no micro-batches of their own"

_BATCH: Final = [
    row("per_device_train_batch_size", "int", 8, "batch.mini_batches_per_step, batch.tokens_per_micro_batch",
         "x processes x gradient_accumulation_steps: samples of an optimizer step"),
    row("gradient_accumulation_steps", "int", 1, "batch.mini_batches_per_step", "see per_device_train_batch_size"),
    row("max_steps", "int", -1, "steps", "/ optimizer steps of a step; -1: num_train_epochs"),
    row("num_train_epochs", "float", 3.0, "steps", "rows x epochs / prompts of a step"),
    row("seed", "int", 42, "seed"),
    row("num_processes", "int", None, "trainer.ranks", "of the launcher, or --gpus"),
    row("mixed_precision", "text", None, "", "not needed: model.dtype is bfloat16, unless bf16 is false"),
    *_none(_ACCELERATE, "compute_environment distributed_type downcast_bf16 enable_cpu_affinity gpu_ids machine_rank "
           "main_process_ip main_process_port main_training_function num_machines rdzv_backend same_network tpu_env "
           "tpu_use_cluster tpu_use_sudo"),
]  # fmt: skip

_GENERATION: Final = [
    row("generation_batch_size", "int", None, "batch.prompts_per_step", "/ num_generations"),
    row("steps_per_generation", "int", None, "batch.prompts_per_step, batch.mini_batches_per_step",
         "None: gradient_accumulation_steps"),
    row("num_generations", "int", 8, "batch.group_size"),
    row("num_iterations", "int", 1, "batch.epochs_per_step"),
    row("max_completion_length", "int", 512, "sampling.max_new_tokens"),
    row("max_prompt_length", "int", None, "model.max_context_tokens", "+ max_completion_length; older versions"),
    row("vllm_max_model_length", "int", None, "model.max_context_tokens",
         "None: 1024 more than max_completion_length", older="vllm_max_model_len"),
    row("num_generations_eval", "int", None, "evaluation.samples_per_prompt", "None: num_generations"),
]  # fmt: skip

_ALGORITHM: Final = [
    row("loss_type", "text", "dapo", "algorithm.loss, algorithm.aggregation",
         "dapo, bnpo: token-mean. grpo: sequence-mean. dr_grpo: constant-length. cispo, sapo, vespo: these losses. "
         "luspo: gspo with sequence-sum",
         values=("grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo", "luspo", "vespo")),
    row("importance_sampling_level", "text", "token", "algorithm.loss.kind", "sequence: gspo",
         values=("token", "sequence")),
    row("epsilon", "float", 0.2, "algorithm.loss.clip_low", "also clip_high without epsilon_high"),
    row("epsilon_high", "float", None, "algorithm.loss.clip_high, algorithm.loss.ratio_max", "cispo: ratio_max"),
    row("delta", "float", None, "algorithm.loss.dual_clip"),
    row("sapo_temperature_pos", "float", 1.0, "algorithm.loss.tau_positive", "with sapo"),
    row("sapo_temperature_neg", "float", 1.05, "algorithm.loss.tau_negative", "with sapo"),
    row("vespo_k_pos", "float", 2.0, "algorithm.loss.power_positive", "with vespo"),
    row("vespo_lambda_pos", "float", 3.0, "algorithm.loss.rate_positive", "with vespo"),
    row("vespo_k_neg", "float", 3.0, "algorithm.loss.power_negative", "with vespo"),
    row("vespo_lambda_neg", "float", 2.0, "algorithm.loss.rate_negative", "with vespo"),
    row("beta", "float", 0.0, "algorithm.kl.coef", "in the loss, by k3"),
    row("scale_rewards", "any", "group", "algorithm.advantage.kind",
         "group: grpo with epsilon 1e-4. none: dr-grpo. batch: dr-grpo, whitened"),
    row("multi_objective_aggregation", "text", "sum_then_normalize", "algorithm.advantage.kind",
         "normalize_then_sum: gdpo with epsilon 1e-4", values=("sum_then_normalize", "normalize_then_sum")),
    row("reward_weights", "any", None, "reward.weight", "one for each of reward_funcs"),
    row("mask_truncated_completions", "bool", False, "algorithm.shaping.mask_truncated, algorithm.shaping.count_masked",
         "count_masked: where samples are averaged, that is, not with token-mean"),
    row("entropy_coef", "float", 0.0, "algorithm.entropy_coef"),
    row("vllm_importance_sampling_correction", "bool", True, "algorithm.correction.kind",
         "with use_vllm, else none. None with vespo, whose weight has the engine's ratio"),
    row("vllm_importance_sampling_mode", "text", "sequence_mask", "algorithm.correction.kind",
         "token_truncate: tis. token_mask: icepop. sequence_truncate: sequence-tis. sequence_mask: "
         "sequence-sum-mask-tis",
         values=("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")),
    row("vllm_importance_sampling_clip_max", "float", 3.0, "algorithm.correction.high", "None: 1e9",
         older="vllm_importance_sampling_cap"),
    row("vllm_importance_sampling_clip_min", "float", None, "algorithm.correction.low", "None: 0"),
    row("off_policy_mask_threshold", "float", None, "algorithm.correction.kind, algorithm.correction.low",
         "off-policy-mask with low = exp(-threshold), if vllm_importance_sampling_correction gives no correction"),
    row("use_bias_correction_kl", "bool", False, "algorithm.kl.importance_weighted", "with beta"),
    row("top_entropy_quantile", "float", 1.0, "", "no equivalent below 1: every sampled token is trained on"),
    *_none(_ADAPTIVE, "use_adaptive_entropy entropy_coef_min entropy_coef_max entropy_coef_delta entropy_target"),
]  # fmt: skip

_SAMPLING: Final = [
    row("temperature", "float", 1.0, "sampling.temperature"),
    *_none(_NUCLEUS, "top_p top_k min_p repetition_penalty"),
    row("generation_kwargs", "any", None, "", "no equivalent: sampling has temperature and max_new_tokens alone"),
    row("chat_template_kwargs", "any", None, "", "no equivalent: change the chat template of the model's folder"),
    row("vllm_structured_outputs_regex", "any", None, "",
         "no equivalent: score the form with the reward function format", older="vllm_guided_decoding_regex"),
    row("use_vllm", "bool", False, "rollout.replicas", "engines are always vLLM"),
    row("vllm_mode", "text", "colocate", "placement.colocated", "colocate: true. server: false",
         values=("colocate", "server")),
    row("vllm_enable_sleep_mode", "bool", False, "rollout.sleep_mode", "with colocate"),
    row("vllm_gpu_memory_utilization", "float", 0.3, "rollout.kv_cache_gib",
         "with colocate: you choose it, as several services share a GPU's memory"),
    row("vllm_tensor_parallel_size", "int", 1, "rollout.gpus_per_replica"),
    *_none(_SERVER, "vllm_server_base_url vllm_server_host vllm_server_port vllm_server_timeout vllm_group_port"),
    *_none(_TRANSFORMERS, "cache_implementation use_transformers_continuous_batching use_transformers_paged "
           "transformers_continuous_batching_config vllm_model_impl ds3_gather_for_generation generation_max_length"),
    row("max_tool_calling_iterations", "int", None, "", "no equivalent: see environment.max_turns in docs/agents.md"),
]  # fmt: skip

_MODEL: Final = [
    row("model_name_or_path", "text", None, "model.source", "a name of the hub: hf:NAME",
         older="model"),
    row("bf16", "bool", None, "model.dtype", "false, without fp16: float32"),
    row("fp16", "bool", False, "model.dtype", "has no equivalent: bfloat16"),
    row("dtype", "text", "float32", "", "not needed: masters are float32, and passes are in model.dtype",
         older="torch_dtype"),
    row("gradient_checkpointing", "bool", True, "trainer.gradient_checkpointing"),
    row("use_liger_kernel", "bool", False, "trainer.liger_kernels", older="use_liger_loss"),
    row("use_peft", "bool", False, "trainer.lora.rank", "false: 0"),
    row("lora_r", "int", 16, "trainer.lora.rank", "with use_peft", older="r"),
    row("lora_alpha", "float", 32.0, "trainer.lora.alpha", "with use_peft"),
    row("lora_target_modules", "texts", (), "trainer.lora.target_modules", "None: q_proj and v_proj",
         older="target_modules"),
    row("use_rslora", "bool", False, "trainer.lora.use_rslora", "with use_peft"),
    row("lora_dropout", "float", 0.05, "", "no equivalent: dropout would make log-probabilities random"),
    *_none("no equivalent: adapters are LoRA on linear layers", "lora_target_parameters lora_modules_to_save "
           "lora_task_type use_dora"),
    *_none(_BNB, "load_in_8bit load_in_4bit bnb_4bit_quant_type use_bnb_nested_quant bnb_4bit_quant_storage"),
    row("model_revision", "text", None, "model.source", "of a model of the hub: hf:NAME@REVISION"),
    *_none("no equivalent: code in a model folder is never run", "trust_remote_code"),
    *_none("not needed: one packed attention kernel that comes with torch", "attn_implementation"),
    *_none("not needed: dropout is always off", "disable_dropout"),
    row("cast_lm_head_to_fp32", "bool", False, "model.head_dtype", "true: float32, in the engines, too"),
    *_none("no equivalent: change config.json of the model's folder", "model_init_kwargs"),
    *_none(_SYNC, "sync_ref_model ref_model_mixup_alpha ref_model_sync_steps"),
    row("router_aux_loss_coef", "float", 0.001, "trainer.router_aux_loss_coef", "if given: only for experts"),
]  # fmt: skip

_REWARD: Final = [
    row("reward_funcs", "texts", (), "reward.function",
         "accuracy_reward: math_verify. think_format_reward: format. get_soft_overlong_punishment: length. "
         "PACKAGE.FUNCTION: the same. Of open-r1: accuracy, format and soft_overlong_punishment"),
    row("max_completion_len", "int", 16384, "reward.options", "of soft_overlong_punishment of open-r1"),
    row("soft_punish_cache", "int", 4096, "reward.options", "of soft_overlong_punishment of open-r1"),
    *_none(_OPEN_R1, "cosine_min_value_wrong cosine_max_value_wrong cosine_min_value_correct cosine_max_value_correct "
           "cosine_max_len repetition_n_grams repetition_max_penalty code_language code_eval_test_batch_size "
           "code_eval_scoring_mode parallel_code_exec_per_proc code_provider e2b_router_url morph_router_url "
           "ioi_provider"),
    row("reward_model_name_or_path", "text", None, "reward.model.source", "a table of its own beside reward_funcs"),
    row("dataset_prompt_column", "text", "prompt", "data.prompt_field"),
]  # fmt: skip

_DATA: Final = [
    row("system_prompt", "text", None, "data.system_prompt"),
    row("chat_template", "text", None, "", "no equivalent: change the chat template of the model's folder"),
    row("dataset_mixture", "any", None, "data.train.path", "of open-r1: a table [[data.train]] each"),
    row("dataset_name", "text", None, "data.train.path", "a name of the hub: hf:NAME", older="train_dataset"),
    row("datasets", "any", None, "data.train.path", "a table [[data.train]] each"),
    row("dataset_train_split", "text", "train", "data.train.split", "of data sets of the hub"),
    row("dataset_config", "text", None, "data.train.config", "of data sets of the hub"),
    row("dataset_test_split", "text", "test", "data.eval.split", "with eval_strategy; of data sets of the hub"),
    row("eval_dataset", "text", None, "data.eval.path", "with eval_strategy; None: the training data's"),
    *_none("no equivalent: data sets are downloaded as a whole", "dataset_streaming streaming"),
    *_none("no equivalent: use data.holdout, or a file of its own", "test_split_size"),
    *_none(_LOADER, "remove_unused_columns pad_to_multiple_of dataloader_drop_last dataloader_num_workers "
           "dataloader_pin_memory dataloader_persistent_workers dataloader_prefetch_factor "
           "dataloader_multiprocessing_context dataloader_in_order data_seed train_sampling_strategy "
           "length_column_name label_names group_by_length"),
    row("shuffle_dataset", "bool", True, "data.order", "false: file"),
]  # fmt: skip

_OPTIMIZER_ROWS: Final = [
    row("learning_rate", "float", 1e-6, "trainer.learning_rate"),
    row("lr_scheduler_type", "text", "linear", "trainer.schedule",
         "constant, constant_with_warmup, linear, cosine, cosine_with_min_lr"),
    row("lr_scheduler_kwargs", "any", None, "trainer.final_learning_rate_share", "min_lr_rate of cosine_with_min_lr"),
    row("warmup_steps", "float", 0.0, "trainer.warmup_steps", "/ optimizer steps of a step; below 1: a share"),
    row("warmup_ratio", "float", 0.0, "trainer.warmup_steps", "share x steps; older versions"),
    row("weight_decay", "float", 0.0, "trainer.weight_decay"),
    row("adam_beta1", "float", 0.9, "trainer.adam_betas", "both betas"),
    row("adam_beta2", "float", 0.999, "trainer.adam_betas", "both betas"),
    row("max_grad_norm", "float", 1.0, "trainer.max_grad_norm", "0 (no clipping): 1e9"),
    *_none("not needed: AdamW's epsilon is 1e-8", "adam_epsilon"),
    *_none(_OPTIMIZER, "optim optim_args optim_target_modules"),
    *_none("not needed: token losses are averaged over all ranks", "average_tokens_across_devices"),
    row("deepspeed", "any", None, "trainer.zero_stage", "the stage in its name; without: 1, which updates as DDP"),
    row("deepspeed_config", "any", None, "trainer.zero_stage, trainer.offload", "of accelerate's YAML"),
    *_none(_FSDP, "fsdp fsdp_config"),
    *_none(_TORCH, "tf32 gradient_checkpointing_kwargs torch_compile torch_compile_backend torch_compile_mode "
           "use_cache torch_empty_cache_steps ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers "
           "ddp_static_graph ddp_backend ddp_timeout liger_kernel_config use_cpu accelerator_config local_rank debug "
           "skip_memory_metrics full_determinism"),
    *_none("no equivalent: use trainer.sequence_parallel_size", "parallelism_config"),
    *_none("no equivalent: no trainer here has this option", "neftune_noise_alpha label_smoothing_factor "
           "auto_find_batch_size ignore_bias_buffers"),
]  # fmt: skip

_RUN: Final = [
    row("output_dir", "text", None, "name", "the last part of the path"),
    row("run_name", "text", None, "name", "before output_dir"),
    row("report_to", "texts", (), "logging.sinks", "tensorboard, wandb, trackio and mlflow; for all, choose yourself"),
    row("project", "text", None, "logging.project", "with a tracker", older="wandb_project"),
    row("wandb_entity", "text", None, "logging.wandb_entity", "with a tracker"),
    row("wandb_run_group", "text", None, "logging.group", "with a tracker"),
    *_none("not needed: a run reports and evaluates by itself", "callbacks benchmarks"),
    row("logging_dir", "text", None, "logging.tensorboard_dir", "with tensorboard"),
    row("eval_strategy", "text", "no", "evaluation.every_steps", "no: no evaluation", values=("no", "steps", "epoch"),
         older="evaluation_strategy"),
    row("eval_steps", "float", None, "evaluation.every_steps", "/ optimizer steps of a step"),
    row("save_strategy", "text", "steps", "checkpoint.every_steps", "no: 10", values=("no", "steps", "epoch", "best")),
    row("save_steps", "float", 500.0, "checkpoint.every_steps", "/ optimizer steps of a step"),
    row("save_total_limit", "int", None, "checkpoint.keep", "if given"),
    *_none(_EVALUATION, "per_device_eval_batch_size prediction_loss_only eval_do_concat_batches "
           "eval_use_gather_object eval_accumulation_steps include_for_metrics batch_eval_metrics bf16_full_eval "
           "fp16_full_eval eval_delay do_train do_eval do_predict"),
    *_none("not needed: there is always one before the first step", "eval_on_start"),
    *_none("not needed: checkpoints always hold what a resumed run needs", "save_only_model save_on_each_node "
           "enable_jit_checkpoint ignore_data_skip restore_callback_states_from_checkpoint"),
    *_none("no equivalent: checkpoint.keep_best keeps the best by held-out score", "load_best_model_at_end "
           "metric_for_best_model greater_is_better"),
    *_none("not needed: fourfold run --resume runs/NAME", "resume_from_checkpoint overwrite_output_dir"),
    *_none(_LOGGED, "logging_strategy logging_steps logging_first_step log_on_each_node "
           "logging_nan_inf_filter include_num_input_tokens_seen log_level log_level_replica disable_tqdm "
           "log_completions log_multimodal num_completions_to_print log_unique_prompts "
           "log_completions_hub_repo"),
    *_none(_TRACKER, "trackio_space_id trackio_bucket_id trackio_static_space_id "
           "wandb_log_unique_prompts"),
    *_none(_HUB, "push_to_hub hub_token hub_private_repo hub_model_id hub_strategy hub_always_push hub_revision "
           "hub_model_revision overwrite_hub_revision push_to_hub_revision"),
]  # fmt: skip

SHARED: Final = (*_BATCH, *_MODEL, *_DATA, *_OPTIMIZER_ROWS, *_RUN)
"""Options that all trainers of TRL have."""
TABLE: Final[Mapping[str, Flag]] = table_of([*_GENERATION, *_ALGORITHM, *_SAMPLING, *_REWARD, *SHARED])
