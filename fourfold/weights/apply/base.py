"""Defines the interface that puts received weights into an engine's model.

    bake(manifest)   once per epoch: checks that the model takes exactly these tensors, without changing it
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
    """The tensors of a manifest that an applier writes in place, that it reloads, and that it leaves out."""

    direct_tensor_count: int
    reload_tensor_count: int
    reload_reason: str = ""  # the reason for reloading tensors that could be written in place
    elsewhere: tuple[str, ...] = ()  # names of tensors that belong to another stage of a pipeline


class CannotApply(Exception):
    """This applier cannot apply the manifest, but another one may; the message has the reason."""


class Applier(Sink, Protocol):
    """Puts weights into the model of one worker."""

    def bake(self, manifest: Manifest) -> ApplyReport:
        """Check that the model takes all tensors of `manifest` and needs no others; do not change the model.

        A stage of a pipeline takes the tensors of its layers, and reports the others as `elsewhere`.

        Raises:
            WrongState: the tensors do not fit the model.
            CannotApply: this applier cannot do it.
        """

    def begin(self, *, stable: bool) -> None:
        """Expect a version. `stable`: the values that `take` gets stay until `finish` or `abort`."""

    def finish(self) -> None:
        """Make the model run with the weights taken, which must be complete."""

    def abort(self) -> ModelState:
        """Make the model run again: "clean" if its weights are whole, "dirty" if they may be mixed."""
