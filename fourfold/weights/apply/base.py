"""Defines how arrived weights get into an engine's model.

    bake(manifest)   once per epoch: would the model take exactly these tensors? The model does not change
    begin()          per version; from here on the applier is a sink. The model is untouched until a tensor arrives
    finish()         the model can run again, with the new weights
    abort()          at any time: the model can run again, "clean" with the old weights, else "dirty"

`DirectApplier` writes into the model's parameters in place. `ReloadApplier` uses the engine's own loaders; it works on
every device, quantised or not. An engine uses the appliers that `proof` has proven with its model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from fourfold.weights.apply.loader_trace import LoaderTrace, NamedTensors
from fourfold.weights.manifest import Manifest
from fourfold.weights.transport.base import Sink

ModelState = Literal["clean", "dirty"]


class TraceableModel(Protocol):
    """The methods of an engine's model that every applier calls."""

    def trace(self, tensors: NamedTensors) -> LoaderTrace:
        """Return the effect that loading these meta tensors would have; the model does not change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ApplyReport:
    """The number of tensors of a manifest that an applier writes in place, and that it reloads."""

    direct_tensor_count: int
    reload_tensor_count: int
    reload_reason: str = ""  # why tensors are reloaded on a device whose memory could be written in place
    elsewhere: tuple[str, ...] = ()  # tensors that another stage of a pipeline must take


class CannotApply(Exception):
    """This applier cannot take the manifest, but another one may; the message gives the reason."""


class Applier(Sink, Protocol):
    """Puts weights into the model of one worker."""

    def bake(self, manifest: Manifest) -> ApplyReport:
        """Check that the model takes all tensors of `manifest` and needs no others, without a change to the model.

        A stage of a pipeline takes those of its layers, and reports the others as `elsewhere`.

        Raises:
            WrongState: it does not.
            CannotApply: this applier cannot do it.
        """

    def begin(self, *, stable: bool) -> None:
        """Expect a version. `stable`: the values that `take` gets stay until `finish` or `abort`."""

    def finish(self) -> None:
        """Make the model run with the weights taken, which must be complete."""

    def abort(self) -> ModelState:
        """Make the model run again: "clean" if its weights are whole, "dirty" if they may be mixed."""
