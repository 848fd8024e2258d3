"""Lists the flags of OpenRLHF's `train_ppo_ray`, version 0.11: defaults, and what becomes of each in a recipe.

`older` are the names before version 0.10.3, in which flags had no dots. Conversions are in `openrlhf_rules.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from fourfold_tools.migrate.flags import Flag, row, table_of

_ALWAYS_PACKED: Final = "not needed: samples are always packed, without padding"
_CHOSEN: Final = "not needed: the transport of weights is chosen for each engine"
_NO_VISION: Final = "no equivalent: models read text alone; train the language model on text prompts"
_OWN_FOLDER: Final = "not needed: a run writes to runs/NAME; its name comes from the last part of this path"


def _groups() -> list[Flag]:
    rows = []
    for group, nodes, gpus in (
        ("actor", "placement.trainer_nodes", "trainer.ranks"),
        ("critic", "critic.ranks", "critic.ranks"),
        ("ref", "reference.replicas", "reference.replicas"),
        ("reward", "reward.replicas", "reward.replicas"),
    ):
        how = "nodes x GPUs per node; 1 replica where the group shares GPUs that Fourfold cannot share"
        if group == "actor":
            how = "trainer.ranks is nodes x GPUs per node"
        elif group == "critic":
            how = "nodes x GPUs per node; 0 (the policy's ranks) with colocate_all, or on several nodes"
        rows.append(row(f"{group}.num_nodes", "int", 1, nodes, how, older=f"{group}_num_nodes"))
        rows.append(row(f"{group}.num_gpus_per_node", "int", 8, gpus, how, older=f"{group}_num_gpus_per_node"))
    return rows


def model_rows(prefix: str) -> list[Flag]:
    """Return the flags of the model that is trained; `prefix` is `actor.`, or `model.` for the trainers of rows."""
    return [
        row(f"{prefix}model_name_or_path", "text", None, "model.source", "a name of the hub: hf:NAME",
             older="pretrain"),
        row(f"{prefix}gradient_checkpointing_enable", "bool", False, "trainer.gradient_checkpointing",
             older="gradient_checkpointing"),
        row(f"{prefix}gradient_checkpointing_reentrant", "bool", False, "",
             "not needed: an implementation detail of torch", older="gradient_checkpointing_use_reentrant"),
        row(f"{prefix}aux_loss_coef", "float", 0.0, "trainer.router_aux_loss_coef", older="aux_loss_coef"),
    ]  # fmt: skip


def optimizer_rows(prefix: str, to: str, rate: float) -> list[Flag]:
    """Return the flags of an optimizer; `prefix` is `actor.`, `critic.`, or empty for the trainers of rows."""
    critic = prefix == "critic."
    shared = ("", "no equivalent: the critic has the optimizer, betas and momentum of the policy") if critic else None
    once_shared = prefix == "actor."  # before the names had dots, these flags were for policy and critic
    return [
        row(f"{prefix}optim", "text", "adam", *(shared or ("trainer.optimizer", "adam: adamw. muon: muon")),
             values=("adam", "muon")),
        row(f"{prefix}muon.lr", "float", 0.02, "",
             "no equivalent: a Muon update has the size of an AdamW update, so adam.lr is the rate of all parameters"),
        row(f"{prefix}muon.momentum", "float", 0.95, *(shared or ("trainer.muon_momentum", "with optim muon"))),
        row(f"{prefix}muon.ns_steps", "int", 5, "", "not needed: 5 Newton-Schulz steps, which DeepSpeed uses as well"),
        row(f"{prefix}muon.nesterov", "bool", True, "", "not needed: always with Nesterov momentum, as in DeepSpeed"),
        row(f"{prefix}muon.no_nesterov", "bool", False, "",
             "no equivalent: always with Nesterov momentum; DeepSpeed ignores this flag, too"),
        row(f"{prefix}adam.lr", "float", rate, f"{to}.learning_rate",
             older=f"{prefix.replace('.', '_')}learning_rate"),
        row(f"{prefix}adam.betas", "pair", (0.9, 0.95), *(shared or ("trainer.adam_betas",)),
             older="" if critic else "adam_betas"),
        row(f"{prefix}adam.eps", "float", 1e-8, "", "not needed: AdamW's epsilon is 1e-8"),
        row(f"{prefix}adam.weight_decay", "float", 0.0, f"{to}.weight_decay", older="" if critic else "l2"),
        row(f"{prefix}lr_scheduler", "text", "cosine_with_min_lr", f"{to}.schedule",
             "constant, constant_with_warmup, linear, cosine, cosine_with_min_lr",
             older="lr_scheduler" if once_shared else ""),
        row(f"{prefix}lr_warmup_ratio", "float", 0.03, f"{to}.warmup_steps",
             "share x steps, rounded up; 0 with constant",
             older="lr_warmup_ratio" if once_shared else ""),
        row(f"{prefix}min_lr_ratio", "float", 0.1, f"{to}.final_learning_rate_share",
             "with cosine_with_min_lr, else 0"),
        row(f"{prefix}max_norm", "float", 1.0, f"{to}.max_grad_norm", "0 (no clipping): 1e9",
             older="max_norm" if once_shared else ""),
    ]  # fmt: skip


_PLACEMENT: Final = [
    *_groups(),
    row("train.colocate_all", "bool", False, "placement.colocated",
         "false with async_enable: engines need GPUs of their own",
         older="colocate_all_models"),
    row("train.colocate_actor_ref", "bool", False, "reference.replicas",
         "1: policy and reference cannot share GPUs without the engines", older="colocate_actor_ref"),
    row("train.colocate_critic_reward", "bool", False, "reward.replicas",
         "1 without colocate_all: no GPU is shared", older="colocate_critic_reward"),
    row("vllm.num_engines", "int", None, "rollout.replicas", "None: 1", older="vllm_num_engines"),
    row("vllm.tensor_parallel_size", "int", 1, "rollout.gpus_per_replica", older="vllm_tensor_parallel_size"),
    row("vllm.sync_backend", "text", "nccl", "", _CHOSEN, older="vllm_sync_backend"),
    row("vllm.sync_with_ray", "bool", False, "", _CHOSEN, older="vllm_sync_with_ray"),
    row("vllm.enable_prefix_caching", "bool", False, "", "not needed: the samples of a prompt always share its cache",
         older="enable_prefix_caching"),
    row("vllm.enforce_eager", "bool", False, "rollout.enforce_eager", older="enforce_eager"),
    row("vllm.enable_sleep", "bool", False, "rollout.sleep_mode", "only with colocate_all and without async",
         older="vllm_enable_sleep"),
    row("vllm.gpu_memory_utilization", "float", 0.95, "rollout.gpu_memory_utilization",
         "with colocate_all: rollout.kv_cache_gib, which you choose, as several services share a GPU's memory",
         older="vllm_gpu_memory_utilization"),
]  # fmt: skip

_ROLLOUT: Final = [
    row("rollout.batch_size", "int", 1024, "batch.prompts_per_step", older="rollout_batch_size"),
    row("rollout.n_samples_per_prompt", "int", 1, "batch.group_size", older="n_samples_per_prompt"),
    row("rollout.micro_batch_size", "int", 1, "reference.tokens_per_batch", "samples x data.max_len, at least 8192",
         older="micro_rollout_batch_size"),
    row("rollout.max_tokens_per_gpu", "int", None, "reference.tokens_per_batch", "with dynamic_batch_enable",
         older="rollout_max_tokens_per_gpu"),
    row("rollout.max_new_tokens", "int", None, "sampling.max_new_tokens", "None: data.max_len - 1, cut by the prompt",
         older="max_new_tokens generate_max_len"),
    row("rollout.temperature", "float", 1.0, "sampling.temperature", older="temperature"),
    row("rollout.top_p", "float", 1.0, "",
         "no equivalent below 1: the engine would renormalise, and importance ratios would be wrong; use temperature",
         older="top_p"),
    row("rollout.vllm_generate_batch_size", "int", None, "",
         "not needed: engines get new prompts as they finish groups, up to asynchrony.max_policy_lag steps ahead",
         older="vllm_generate_batch_size"),
]  # fmt: skip

_TRAIN: Final = [
    row("train.batch_size", "int", 128, "batch.mini_batches_per_step",
         "rollout.batch_size x n_samples_per_prompt / train.batch_size", older="train_batch_size"),
    row("train.micro_batch_size", "int", 1, "batch.tokens_per_micro_batch", "samples x data.max_len",
         older="micro_train_batch_size"),
    row("train.max_epochs", "int", 1, "batch.epochs_per_step", older="max_epochs"),
    row("train.num_episodes", "int", 1, "steps", "rows x episodes / rollout.batch_size", older="num_episodes"),
    row("train.seed", "int", 42, "seed", older="seed"),
    row("train.full_determinism_enable", "bool", False, "",
         "no equivalent: seed fixes data, sampling and random states; the kernels of a GPU may differ",
         older="full_determinism"),
    row("train.dynamic_batch_enable", "bool", False, "batch.tokens_per_micro_batch",
         "micro-batches are always filled by tokens; true: up to max_tokens_per_gpu", older="use_dynamic_batch"),
    row("train.max_tokens_per_gpu", "int", 16192, "batch.tokens_per_micro_batch",
         "x ring_attn_size, at least data.max_len; with dynamic_batch_enable", older="train_max_tokens_per_gpu"),
    row("train.async_enable", "bool", False, "asynchrony.max_policy_lag", "async_queue_size, else 0",
         older="async_train"),
    row("train.async_queue_size", "int", 1, "asynchrony.max_policy_lag", "with async_enable",
         older="async_queue_size"),
    row("train.partial_rollout_enable", "bool", False, "weights.pause",
         "true: recompute (vLLM clears the cache of paused requests); else wait", older="partial_rollout"),
    row("train.enable_ema", "bool", False, "trainer.ema_decay", "ema_beta, else 0", older="enable_ema"),
    row("train.ema_beta", "float", 0.992, "trainer.ema_decay", "with enable_ema", older="ema_beta"),
    row("train.agent_func_path", "text", None, "environment.source",
         "FILE:AgentExecutor, with agents.source = tasks and one gateway", older="agent_func_path"),
]  # fmt: skip

_ALGORITHM: Final = [
    row("algo.advantage.estimator", "text", "gae", "algorithm.preset, algorithm.advantage, algorithm.whiten",
         "gae: openrlhf-ppo. reinforce: openrlhf-reinforce++. reinforce_baseline: openrlhf-reinforce++-baseline. rloo: "
         "openrlhf-rloo. group_norm: openrlhf-grpo. dr_grpo: openrlhf-dr-grpo",
         values=("gae", "reinforce", "rloo", "reinforce_baseline", "group_norm", "dr_grpo"),
         older="advantage_estimator"),
    row("algo.advantage.gamma", "float", 1.0, "algorithm.advantage.gamma",
         "with gae and reinforce; OpenRLHF uses 1 with the others", older="gamma"),
    row("algo.advantage.lambd", "float", 1.0, "algorithm.advantage.lam", "with gae", older="lambd"),
    row("algo.advantage.no_std_norm", "bool", False, "algorithm.whiten",
         "true: center. With rloo, group_norm and dr_grpo nothing is whitened", older="no_advantage_std_norm"),
    row("algo.advantage.is_correction_enable", "bool", False, "algorithm.correction.kind", "false: none",
         older="enable_vllm_is_correction"),
    row("algo.advantage.is_correction_threshold", "pair", (0.5, 5.0),
         "algorithm.correction.low, algorithm.correction.high", "with is_correction_enable",
         older="vllm_is_truncated_threshold"),
    row("algo.advantage.is_correction_type", "text", "tis", "algorithm.correction.kind",
         "tis, icepop; seq-mask-tis: sequence-mask-tis. None with the loss gspo",
         values=("tis", "icepop", "seq-mask-tis"), older="vllm_is_correction_type"),
    row("algo.kl.init_coef", "float", 0.01, "algorithm.kl.coef", older="init_kl_coef"),
    row("algo.kl.estimator", "text", "k1", "algorithm.kl.estimator", "k1 in the loss: k2, which has a gradient",
         values=("k1", "k2", "k3"), older="kl_estimator"),
    row("algo.kl.use_loss", "bool", False, "algorithm.kl.placement", "true: loss. false: reward",
         older="use_kl_loss"),
    row("algo.kl.target", "float", None, "algorithm.kl.target", "None: 0", older="kl_target"),
    row("algo.kl.horizon", "int", 10_000, "algorithm.kl.horizon", "with kl.target", older="kl_horizon"),
    row("algo.dynamic_filtering_enable", "bool", False, "algorithm.filter.keep", "true: mean-inside. false: all",
         older="dynamic_filtering"),
    row("algo.dynamic_filtering_range", "pair", (0.0, 1.0), "algorithm.filter.low, algorithm.filter.high",
         "with dynamic_filtering_enable", older="dynamic_filtering_reward_range"),
    row("actor.policy_loss_type", "text", "ppo", "algorithm.loss.kind, algorithm.aggregation",
         "ppo: token-mean. gspo: form sequence and sequence-mean", values=("ppo", "gspo"), older="policy_loss_type"),
    row("actor.eps_clip", "float", 0.2, "algorithm.loss.clip_low, algorithm.loss.clip_high",
         "unless eps_clip_low_high is set", older="eps_clip"),
    row("actor.eps_clip_low_high", "pair", None, "algorithm.loss.clip_low, algorithm.loss.clip_high",
         "None: eps_clip twice", older="eps_clip_low_high"),
    row("actor.dual_clip", "float", None, "algorithm.loss.dual_clip", "None: 0. Not with gspo", older="dual_clip"),
    row("actor.entropy_coef", "float", None, "algorithm.entropy_coef", "None: 0", older="entropy_loss_coef"),
]  # fmt: skip

_MODELS: Final = [
    *model_rows("actor."),
    row("actor.freeze_visual_encoder", "bool", False, "", _NO_VISION, older="freeze_visual_encoder"),
    *optimizer_rows("actor.", "trainer", 1e-6),
    row("critic.model_name_or_path", "text", None, "critic.source",
         "None: the reward model if there is one, else the policy's; only with gae", older="critic_pretrain"),
    row("critic.value_clip", "float", 0.5, "critic.value_clip", "with gae", older="value_clip"),
    row("critic.freezing_steps", "int", -1, "critic.policy_starts_at_step", "freezing_steps + 1; with gae",
         older="freezing_actor_steps"),
    row("critic.save_value_network", "bool", False, "", "not needed: a run exports its critic, too",
         older="save_value_network"),
    *optimizer_rows("critic.", "critic", 9e-6),
    row("ref.offload", "bool", False, "",
         "no equivalent: each reference service holds a whole model; use fewer reference.replicas",
         older="ref_reward_offload"),
    row("reward.offload", "bool", False, "", "no equivalent: a reward model stays on its GPU; use fewer replicas"),
]  # fmt: skip

_REWARD: Final = [
    row("reward.model_name_or_path", "text", None, "reward.model.source",
         "chat = false: it reads the tokens' text, with the policy's template", older="reward_pretrain"),
    row("reward.remote_url", "text", None, "reward.function, reward.http",
         "FILE.py: FILE.py:reward_func. URL: http", older="remote_rm_url"),
    row("reward.normalize_enable", "bool", False, "algorithm.shaping.normalize",
         "with a reward model: by the running mean and deviation of the scores", older="normalize_reward"),
    row("reward.clip_range", "pair", (-10.0, 10.0), "algorithm.shaping.clip, algorithm.shaping.clip_low",
         "clip: the upper bound. clip_low: the lower one, if it is not -clip", older="reward_clip_range"),
    row("reward.overlong_buffer_len", "float", None, "algorithm.shaping.overlong_buffer",
         "as a share of sampling.max_new_tokens", older="overlong_buffer_len"),
    row("reward.overlong_penalty_factor", "float", 1.0, "algorithm.shaping.overlong_penalty",
         "with overlong_buffer_len", older="overlong_penalty_factor"),
    row("reward.stop_properly_penalty_coef", "float", None, "algorithm.shaping.truncated",
         older="stop_properly_penalty_coef"),
]  # fmt: skip

_DEEPSPEED: Final = [
    row("ds.zero_stage", "int", 2, "trainer.zero_stage", "0: 1, which adds gradients in float32", older="zero_stage"),
    row("ds.param_dtype", "text", "bf16", "model.dtype", "bf16: bfloat16. fp32: float32. fp16: bfloat16",
         values=("bf16", "fp16", "fp32"), older="param_dtype data_type"),
    row("ds.zpg", "int", 1, "trainer.zero_hpz_partition_size", "with ZeRO stage 3", older="zpg"),
    row("ds.adam_offload", "bool", False, "trainer.offload", "true: optimizer. false: none", older="adam_offload"),
    row("ds.overlap_comm", "bool", False, "", "not needed: gradients are reduced during the backward pass",
         older="overlap_comm"),
    row("ds.grad_accum_dtype", "text", None, "", "not needed: gradients are added in float32 from ZeRO stage 1 on",
         older="grad_accum_dtype"),
    row("ds.deepcompile", "bool", False, "", "no equivalent: use trainer.liger_kernels", older="deepcompile"),
    row("ds.tensor_parallel_size", "int", 1, "",
         "no equivalent: ZeRO stage 3 divides the model among all ranks", older="ds_tensor_parallel_size"),
    row("ds.enable_sleep", "bool", False, "", "not needed: the trainer frees GPU memory between steps where it shares",
         older="deepspeed_enable_sleep"),
    row("ds.packing_samples", "bool", False, "", _ALWAYS_PACKED, older="packing_samples"),
    row("ds.attn_implementation", "text", "flash_attention_2", "",
         "not needed: one packed attention kernel that comes with torch", older="attn_implementation"),
    row("ds.experts_implementation", "text", None, "", "not needed: transformers chooses the kernel of the experts"),
    row("ds.use_liger_kernel", "bool", False, "trainer.liger_kernels", older="use_liger_kernel"),
    row("ds.ring_attn_size", "int", 1, "trainer.sequence_parallel_size",
         "Ulysses in place of ring attention: must divide the attention heads", older="ring_attn_size"),
    row("ds.ring_attn_head_stride", "int", 1, "", "not needed: Ulysses exchanges heads in one step",
         older="ring_head_stride"),
    row("ds.load_in_4bit", "bool", False, "", "no equivalent: weights are trained in bfloat16 or float32",
         older="load_in_4bit"),
    row("ds.lora.rank", "int", 0, "trainer.lora.rank", older="lora_rank"),
    row("ds.lora.alpha", "int", 16, "trainer.lora.alpha", "with lora.rank", older="lora_alpha"),
    row("ds.lora.target_modules", "texts", ("all-linear",), "trainer.lora.target_modules", "with lora.rank",
         older="target_modules"),
    row("ds.lora.dropout", "float", 0.0, "", "no equivalent: dropout would make log-probabilities random",
         older="lora_dropout"),
    row("ds.value_head_prefix", "text", "score", "", "not needed: the head of the folder is found by its shape",
         older="value_head_prefix"),
    row("ds.use_universal_ckpt", "bool", False, "", "not needed: every checkpoint fits any number of ranks",
         older="use_ds_universal_ckpt universal_ckpt"),
]  # fmt: skip

_DATA: Final = [
    row("data.prompt_dataset", "text", None, "data.train.path",
         "a name of the hub: hf:NAME; several: a table [[data.train]] each", older="prompt_data"),
    row("data.prompt_probs", "text", None, "data.train.weight", "of several sources", older="prompt_data_probs"),
    row("data.prompt_split", "text", "train", "data.train.split", "of data sets of the hub", older="prompt_split"),
    row("data.input_key", "text", "input", "data.prompt_field", older="input_key"),
    row("data.label_key", "text", None, "data.answer_field", older="label_key"),
    row("data.input_template", "text", None, "data.train.template", "{} becomes {input_key}", older="input_template"),
    row("data.apply_chat_template", "bool", False, "data.chat", older="apply_chat_template"),
    row("data.max_len", "int", 2048, "model.max_context_tokens", "older scripts: prompt_max_len + generate_max_len",
         older="max_len"),
    row("data.max_samples", "int", 100_000_000, "data.train.size", "if given", older="max_samples"),
    row("data.image_key", "text", "images", "", _NO_VISION, older="image_key"),
    row("data.max_images_per_prompt", "int", 0, "", _NO_VISION, older="max_images_per_prompt"),
    row("data.disable_fast_tokenizer", "bool", False, "", "not needed: every tokenizer is tokenizer.json",
         older="disable_fast_tokenizer"),
    row("data.dataloader_num_workers", "int", 0, "", "not needed: prompts are tokenized once, at the start",
         older="dataloader_num_workers"),
    row("use_ms", "bool", False, "", "no equivalent: models and data are folders; download them from ModelScope"),
]  # fmt: skip

_EVALUATION: Final = [
    row("eval.dataset", "text", None, "data.eval.path",
         "with eval.steps above 0; a name of the hub: hf:NAME; several: a table [[data.eval]] each",
         older="eval_dataset"),
    row("eval.split", "text", "train", "data.eval.split", "of data sets of the hub", older="eval_split"),
    row("eval.steps", "int", -1, "evaluation.every_steps", "with eval.dataset", older="eval_steps"),
    row("eval.temperature", "float", 0.6, "data.eval.temperature", "with eval.dataset, unless agents answer",
         older="eval_temperature"),
    row("eval.n_samples_per_prompt", "int", 4, "evaluation.samples_per_prompt", "with eval.dataset",
         older="eval_n_samples_per_prompt"),
]  # fmt: skip

_CHECKPOINTS: Final = [
    row("ckpt.path", "text", "./ckpt/checkpoints_ppo_ray", "", _OWN_FOLDER, older="ckpt_path"),
    row("ckpt.output_dir", "text", "./ckpt", "name", "the last part of the path", older="save_path"),
    row("ckpt.save_steps", "int", -1, "checkpoint.every_steps", "-1: 10, because every run can be resumed",
         older="save_steps"),
    row("ckpt.save_hf", "bool", False, "checkpoint.export_every_steps", "save_steps; runs/NAME/model always",
         older="save_hf_ckpt"),
    row("ckpt.disable_ds", "bool", False, "", "no equivalent: checkpoints always hold what a resumed run needs",
         older="disable_ds_ckpt"),
    row("ckpt.max_num", "int", 3, "checkpoint.keep", older="max_ckpt_num"),
    row("ckpt.max_mem", "float", None, "", "no equivalent: checkpoint.keep limits the number", older="max_ckpt_mem"),
    row("ckpt.load_enable", "bool", False, "", "not needed: fourfold run --resume runs/NAME",
         older="load_checkpoint"),
    row("ckpt.best_metric_key", "text", "", "checkpoint.keep_best", "1 with evaluations, 0 with none",
         older="best_metric_key"),
]  # fmt: skip

_LOGGING: Final = [
    row("logger.logging_steps", "int", 1, "", "not needed: every step is logged", older="logging_steps"),
    row("logger.wandb.key", "text", None, "logging.sinks", "wandb, which keeps the key itself", older="use_wandb"),
    row("logger.wandb.org", "text", None, "logging.wandb_entity", "with a tracker", older="wandb_org"),
    row("logger.wandb.group", "text", None, "logging.group", "with a tracker", older="wandb_group"),
    row("logger.wandb.project", "text", "openrlhf_train_ppo", "logging.project", "with a tracker",
         older="wandb_project"),
    row("logger.wandb.run_name", "text", None, "name", older="wandb_run_name", how="before ckpt.output_dir"),
    row("logger.tensorboard_dir", "text", None, "logging.sinks, logging.tensorboard_dir", "tensorboard",
         older="use_tensorboard"),
]  # fmt: skip

# Flags that newer versions have no more.
_REMOVED: Final = [
    row("local_rank", "int", -1, "", "not needed: the launcher numbers the ranks"),
    row("bf16", "bool", False, "model.dtype", "bfloat16"),
    row("flash_attn", "bool", False, "", "not needed: one packed attention kernel that comes with torch"),
    row("prompt_max_len", "int", 1024, "model.max_context_tokens", "added to generate_max_len, unless max_len is set"),
    row("use_kl_estimator_k3", "bool", False, "algorithm.kl.estimator", "k3"),
    row("use_icepop", "bool", False, "algorithm.correction.kind", "icepop"),
    row("ptx_coef", "float", 0.05, "", "no equivalent: there is no pretraining loss"),
    row("pretrain_data", "text", None, "", "no equivalent: there is no pretraining loss"),
    row("pretrain_data_probs", "text", None, "", "no equivalent: there is no pretraining loss"),
    row("pretrain_split", "text", "train", "", "no equivalent: there is no pretraining loss"),
    row("perf", "bool", False, "", "not needed: every step has its times and FLOP/s in metrics.jsonl"),
    row("actor_init_on_gpu", "bool", False, "", "not needed: each rank reads its part of the weights"),
    row("disable_trace_cache", "bool", False, "", "not needed: an option of DeepSpeed that Fourfold sets itself"),
    row("torch_compile", "bool", False, "", "no equivalent: use trainer.liger_kernels"),
]  # fmt: skip

TABLE: Final[Mapping[str, Flag]] = table_of(
    [
        *_PLACEMENT,
        *_ROLLOUT,
        *_TRAIN,
        *_ALGORITHM,
        *_MODELS,
        *_REWARD,
        *_DEEPSPEED,
        *_DATA,
        *_EVALUATION,
        *_CHECKPOINTS,
        *_LOGGING,
        *_REMOVED,
    ]
)
