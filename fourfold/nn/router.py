"""Balances the load of a mixture of experts: the auxiliary loss of its routers, and the use of each expert.

The loss of one layer (Switch Transformers, arXiv 2101.03961, eq. 4 to 6; for top-k routing as in the
`load_balancing_loss_func` of transformers) is

    loss = E * sum over experts of f_e * P_e
    f_e    share of the t tokens that are routed to expert e; the sum over the experts is k. No gradient.
    P_e    mean over the tokens of the router's probability of e, softmax(logits)

and the loss of a pass is the mean over its layers: k if all experts are used alike, more if not. The function of
transformers joins the tokens of all layers first, which can hide the imbalance of one layer behind that of another.

As in Megatron-LM, each router attaches its own loss to the weights that it returns, so its gradient comes with that of
the pass, whatever else the pass computes. If several ranks share a row (sequence.py), f and P are those of the whole
row, and each rank attaches the part of its slice. Gradient checkpointing runs layers twice, but only the second run has
a graph to attach to. So nothing counts double, and no layer's logits outlive it.

Legend: t tokens of a pass, E experts, k experts that a token is routed to, L layers with a router.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fourfold.errors import ConfigError
from fourfold.nn.sequence import Exchange


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Routed:
    loss: Tensor  # scalar: mean balance loss of the layers, detached
    counts: Tensor  # [L, E]: tokens routed to each expert; each row adds up to k t


class Routers:
    """The routers of one model. The ranks of `exchange` share every row. The thread that runs the model uses it."""

    def __init__(self, modules: list[nn.Module], exchange: Exchange | None = None) -> None:
        self.token_count = 0
        """Tokens of the next pass's row. Needed only with an exchange, because a slice may end in padding."""
        self.weight = 0.0  # of the mean loss in the gradient; a pass keeps the value that it had at its forward
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}
        self._count, self._exchange = len(modules), exchange
        for index, module in enumerate(modules):
            module.register_forward_hook(self._hook(index))

    def routed(self) -> Routed:
        """Return the routing of the last pass in training mode."""
        losses, counts = zip(*(self._layers[index] for index in range(self._count)), strict=True)
        return Routed(loss=torch.stack(losses).mean(), counts=torch.stack(counts))

    def _hook(self, index: int) -> Any:
        def attach(module: nn.Module, _arguments: Any, output: tuple[Tensor, Tensor, Tensor]) -> Any:
            if not module.training:
                return output
            logits, weights, experts = output
            part, loss, counts = balance_loss(logits, experts, self._exchange, token_count=self.token_count)
            # By layer: a checkpointed layer runs again, with the same result.
            self._layers[index] = loss, counts
            if not self.weight or not weights.requires_grad:
                return output
            attached = _Attach.apply(weights, part * (self.weight / self._count))  # type: ignore[no-untyped-call]
            return logits, attached, experts

        return attach


def install(model: Any, *, coef: float = 0.0, exchange: Exchange | None = None) -> Routers | None:
    """Hook into the routers of a model of transformers, whole in memory; return None if it has none of a known kind.

    Known routers choose by softmax(logits) and return (logits [t, E], weights [t, k], experts [t, k]), such as those of
    Mixtral, Qwen2-MoE, Qwen3-MoE and OLMoE. Others are balanced in other ways (DeepSeek-V3 by a bias).

    Raises ConfigError: `coef`, the weight that the loss will have, is set, but the model has no known router.
    """
    config = model.config.get_text_config()
    kinds = [getattr(module, "_can_record_outputs", None) or {} for module in model.modules()]
    recorder = next((kind["router_logits"] for kind in kinds if "router_logits" in kind), None)
    target = getattr(recorder, "target_class", None)
    modules = [module for module in model.modules() if target is not None and isinstance(module, target)]
    if modules and hasattr(config, "router_aux_loss_coef") and all(_is_known(module, config) for module in modules):
        return Routers(modules, exchange)
    if coef:
        raise ConfigError(
            f"trainer.router_aux_loss_coef = {coef:g}, but {type(model).__name__} has no router whose load can be "
            f"balanced here; remove the key, or train a mixture of experts such as MixtralForCausalLM or "
            f"Qwen3MoeForCausalLM"
        )
    return None


def balance_loss(
    logits: Tensor, experts: Tensor, exchange: Exchange | None = None, *, token_count: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the balance loss of one layer.

    Args:
        logits: [t, E] of the router; with an exchange, of this rank's slice.
        experts: int64 [t, k]: the experts that each token is routed to.
        exchange: the ranks that share the row.
        token_count: t of the row without padding; used only with an exchange.

    Returns:
        This rank's part of the loss, with the gradient of P (the parts of all ranks add up to the loss); the loss,
        detached; the tokens of each expert, [E]. In float32, or float64 for float64 logits.
    """
    size, count = logits.shape
    total, own = size, size
    if exchange is not None:
        total, own = token_count, min(max(token_count - exchange.rank * size, 0), size)
    wide = torch.promote_types(logits.dtype, torch.float32)
    probabilities = torch.softmax(logits[:own].to(wide), -1).sum(0)
    chosen = experts[:own].reshape(-1)
    # Not bincount, which synchronises with the device.
    counts = probabilities.new_zeros(count).scatter_add_(0, chosen, torch.ones_like(chosen, dtype=wide))
    whole = torch.stack([counts, probabilities.detach()])
    if exchange is not None:
        exchange.add(whole)
    slope = count * whole[0] / total**2
    return (slope * probabilities).sum(), (slope * whole[1]).sum(), whole[0]


class _Attach(torch.autograd.Function):
    """Return the first argument; in the backward pass the second gets the gradient 1."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, loss: Tensor) -> Tensor:
        ctx.save_for_backward(loss)
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        (loss,) = ctx.saved_tensors
        return gradients[0], torch.ones_like(loss)


@torch.no_grad()
def _is_known(module: nn.Module, config: Any) -> bool:
    """Return whether a router's output for one token has the known form."""
    parameter = next(module.parameters(), None)
    if parameter is None:
        return False
    try:
        output = module(torch.zeros(1, config.hidden_size, dtype=parameter.dtype, device=parameter.device))
    except (TypeError, RuntimeError):  # its arguments differ
        return False
    shapes = [x.shape if isinstance(x, Tensor) else None for x in output] if isinstance(output, tuple) else []
    experts = config.num_experts_per_tok
    return (
        len(shapes) == 3
        and shapes[0] is not None
        and len(shapes[0]) == 2
        and shapes[1] == shapes[2] == (1, experts)
        and not output[2].is_floating_point()
    )
