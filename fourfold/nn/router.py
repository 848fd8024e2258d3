"""Load balancing of a mixture of experts: the auxiliary loss of its routers, and how evenly experts are used.

Of one layer (Switch Transformers, arXiv 2101.03961, eq. 4 to 6; for top-k routing as in the
`load_balancing_loss_func` of transformers):

    loss = E * sum over experts of f_e * P_e
    f_e    share of the t tokens that are routed to expert e; over the experts it adds up to k. No gradient.
    P_e    mean over the tokens of the router's probability of e, softmax(logits)

and the mean over the layers of a pass: k when all experts are used alike, more when they are not.
It is the paper's loss of each layer; transformers' function joins the tokens of all layers first,
where one layer's favourite may hide that of another.

The loss is not returned and added to another one: each router attaches its own to the weights
that it returns, as Megatron-LM does, so that its gradient comes with that of the pass, whatever
else the pass is for. Where several ranks share a row (sequence.py), f and P are those of the whole
row, and each rank attaches the part of its slice. Under gradient checkpointing layers run twice;
only the second time is there something to attach to, so nothing counts double, and no layer's
logits outlive it.

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
    """What the routers of a model did in one pass."""

    loss: Tensor
    """Scalar: mean over the layers, detached."""
    counts: Tensor
    """[L, E]: tokens that each expert got; a row adds up to k t."""


class Routers:
    """The routers of one model. Made by `install`; belongs to the thread that runs the model."""

    def __init__(self, modules: list[nn.Module], exchange: Exchange | None = None) -> None:
        """Hook into them; the ranks of `exchange` share every row."""
        self.token_count = 0
        """Of the row of the next pass; needed with an exchange alone, because a slice may end in padding."""
        self.weight = 0.0
        """Of the mean loss in the gradient of the passes from now on; a pass keeps that of its forward."""
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}
        self._count, self._exchange = len(modules), exchange
        for index, module in enumerate(modules):
            module.register_forward_hook(self._hook(index))

    def routed(self) -> Routed:
        """Return what the last pass in training mode did."""
        losses, counts = zip(*(self._layers[index] for index in range(self._count)), strict=True)
        return Routed(loss=torch.stack(losses).mean(), counts=torch.stack(counts))

    def _hook(self, index: int) -> Any:
        def attach(module: nn.Module, _arguments: Any, output: tuple[Tensor, Tensor, Tensor]) -> Any:
            if not module.training:
                return output
            logits, weights, experts = output
            part, loss, counts = balance_loss(logits, experts, self._exchange, token_count=self.token_count)
            # By layer, because a checkpointed layer runs again, with the same result.
            self._layers[index] = loss, counts
            if not self.weight or not weights.requires_grad:
                return output
            attached = _Attach.apply(weights, part * (self.weight / self._count))  # type: ignore[no-untyped-call]
            return logits, attached, experts

        return attach


def install(model: Any, *, coef: float = 0.0, exchange: Exchange | None = None) -> Routers | None:
    """Return the routers of a model, hooked into, or None: it has none, or of a kind that is not known here.

    Known are those that choose by softmax(logits) and return (logits [t, E], weights [t, k], experts [t, k]), such as
    of Mixtral, Qwen2-MoE, Qwen3-MoE and OLMoE. Others are balanced in other ways (DeepSeek-V3 by a bias).

    Args:
        model: of transformers, whole in memory.
        coef: that their loss will be weighted with.
        exchange: the ranks that share every row, if there are several.

    Raises:
        ConfigError: there is a coefficient, but no router that is known.
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
    """Return of one layer this rank's part of the loss, with the gradient of P; the loss, detached; tokens by expert.

    Two scalars and [E]; float32, or float64 from float64. The parts of the ranks of an exchange add up to the loss.

    Args:
        logits: [t, E], of the router, or of this rank's slice.
        experts: int64 [t, k], those that each token is routed to.
        exchange: the ranks that share the row.
        token_count: t of the row, without padding; read with an exchange alone.
    """
    size, count = logits.shape
    total, own = size, size
    if exchange is not None:
        total, own = token_count, min(max(token_count - exchange.rank * size, 0), size)
    wide = torch.promote_types(logits.dtype, torch.float32)
    probabilities = torch.softmax(logits[:own].to(wide), -1).sum(0)
    chosen = experts[:own].reshape(-1)
    # Not bincount: it waits for the device.
    counts = probabilities.new_zeros(count).scatter_add_(0, chosen, torch.ones_like(chosen, dtype=wide))
    whole = torch.stack([counts, probabilities.detach()])
    if exchange is not None:
        exchange.add(whole)
    slope = count * whole[0] / total**2
    return (slope * probabilities).sum(), (slope * whole[1]).sum(), whole[0]


class _Attach(torch.autograd.Function):
    """Returns its first argument; backward, the second has gradient 1 as well."""

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
    """Whether a router answers in the known form, asked with one token."""
    parameter = next(module.parameters(), None)
    if parameter is None:
        return False
    try:
        output = module(torch.zeros(1, config.hidden_size, dtype=parameter.dtype, device=parameter.device))
    except (TypeError, RuntimeError):  # it wants something else
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
