"""What a recipe's optimizers do, as sentences: for `fourfold plan`."""

from __future__ import annotations

from fourfold.config import Config, CriticConfig, TrainerConfig


def optimizer_plan(config: Config) -> list[str]:
    """Return one paragraph for the policy, one for the critic if there is one, and one on what is offloaded."""
    trainer = config.trainer
    beta1, beta2 = trainer.adam_betas
    adamw = f"AdamW with betas {beta1:g} and {beta2:g}"
    kind = {
        "adamw": adamw,
        "muon": f"Muon with momentum {trainer.muon_momentum:g} for the layers' matrices, {adamw} for the rest",
    }[trainer.optimizer]
    lines = [f"{kind}; {_rates(trainer, config.steps)}"]
    if config.algorithm.needs_critic:
        lines.append(f"critic: the same; {_rates(config.critic, config.steps)}")
    if trainer.offload != "none":
        lines.append(_offload(trainer))
    return lines


def _rates(table: TrainerConfig | CriticConfig, steps: int) -> str:
    """Return learning rate, decay and clipping of a model."""
    warmup = ""
    if table.warmup_steps:
        warmup = f", reached after {table.warmup_steps} {'step' if table.warmup_steps == 1 else 'steps'}"
    if table.schedule == "constant":
        course = "constant" if not warmup else "constant from then on"
    else:
        course = f"{'falling in a line' if table.schedule == 'linear' else 'falling as a cosine'} to "
        course += f"{table.final_learning_rate_share:.3g} of it after step {steps}"
    decay = f"weight decay {table.weight_decay:g}, " if table.weight_decay else ""
    return (
        f"learning rate {table.learning_rate:g}{warmup}, {course}; {decay}gradients clipped to a norm of "
        f"{table.max_grad_norm:g}."
    )


def _offload(trainer: TrainerConfig) -> str:
    what = "Masters and moments"
    if trainer.offload == "optimizer+parameters":
        what = "Weights, masters and moments"
    where = "stay in main memory, and the CPU updates them."
    if trainer.device == "cpu":
        return f"{what} {where} On CPU they are there without offloading, too, which only costs time here."
    weights = " Each layer's weights come to the GPU for its passes." if "parameters" in trainer.offload else ""
    return f"{what} {where}{weights}"
