"""Runs real trainer engines with LoRA, one after another: `python -m tests.support.lora_driver CASES.json OUT`.

Cases and engines are those of `tests.support.trainer_driver`. The values of `does`:

    train     three steps, saved in `folder` after the second
    resume    the third step, from the checkpoint in `source`
    refuse    saves in `folder`, then loads the checkpoints of OUT/refused.json; OUT/<name>.txt has the errors

OUT/<name> <moment> are exports, OUT/<name> <moment>.safetensors the weights that an engine receives at the same moment.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch

from fourfold.errors import WrongState
from fourfold.weights.digest import digest_of
from fourfold.weights.tensor_sums import partial_sums
from fourfold.weights.transport.base import TransferGroup, make_receiver
from fourfold.weights.transport.waiting import Deadline
from tests.support.trainer_driver import Case, Run
from tests.support.weight_peers import Collector

_TIMEOUT = 30.0


def export(run: Run, out: Path, moment: str, *, ema: bool = False) -> None:
    """Export the model into OUT/<name> <moment>."""
    folder = out / f"{run.case.name} {moment}"
    folder.mkdir()
    run.engine.export(folder, ema=ema)


def stream(run: Run, out: Path, moment: str, *, epoch: int, backend: str = "shm") -> None:
    """Send the weights to a receiver in this process, and write the received tensors."""
    manifest = run.engine.manifest()
    if run.case.stage == 3:  # the transfer must gather nothing: an abort may reach only some ranks before a collective
        policy: Any = run.engine._worker.policy
        assert all(p.ds_status.name == "AVAILABLE" for p in policy._adapters.parameters)
    receiver = make_receiver(
        backend, TransferGroup(epoch=epoch, manifest=manifest, receiver_count=1), 0, torch.device("cpu")
    )
    receiver.accept(run.engine.make_offers(epoch, backend, 1, timeout=_TIMEOUT))
    run.engine.open_weights(epoch, timeout=_TIMEOUT)
    receiver.open(Deadline(_TIMEOUT))
    sent = run.engine.send_weights(epoch, epoch, timeout=_TIMEOUT)
    sink = Collector(manifest)
    receiver.receive(epoch, sink, Deadline(_TIMEOUT))
    assert digest_of(manifest, partial_sums(manifest, sink.taken)) == sent.weights_digest
    tensors = dict(zip((spec.name for spec in manifest.tensors), sink.tensors(), strict=True))
    notes = {"adapter": json.dumps(asdict(manifest.adapter))} if manifest.adapter else None
    safetensors.torch.save_file(tensors, out / f"{run.case.name} {moment}.safetensors", metadata=notes)
    receiver.close()


def perform(case: Case, out: Path) -> dict[str, Any]:
    """Train three steps; save, send and export in between."""
    run, saved = Run(case, out), Path(case.folder)
    saved.mkdir()
    stream(run, out, "0", epoch=0)  # before anything was forwarded
    seen: dict[str, Any] = {"before": run.logprobs()}
    export(run, out, "0")
    for number in (1, 2):
        run.train(number)
    stream(run, out, "2", epoch=1)
    export(run, out, "2")
    seen["at 2"] = run.logprobs()
    run.engine.save(saved)
    run.train(3)
    stream(run, out, "3", epoch=2)  # directly after an update, before any pass
    seen |= {"after": run.logprobs(), "losses": run.losses, "norms": run.norms}
    export(run, out, "3")
    if case.ema:
        export(run, out, "average", ema=True)
        seen["after average"] = run.logprobs()
    run.close()
    return seen


def resume(case: Case, out: Path) -> dict[str, Any]:
    """Load another case's checkpoint and train the third step."""
    run = Run(case, out)
    run.engine.load(Path(case.source))
    stream(run, out, "2", epoch=0)
    seen: dict[str, Any] = {"at 2": run.logprobs()}
    run.train(3)
    seen["after"] = run.logprobs()
    stream(run, out, "3", epoch=1)
    run.close()
    return seen


def refuse(case: Case, out: Path) -> None:
    """Load checkpoints that do not fit; write one error per line, and check that nothing changed."""
    run = Run(case, out)
    before, said = run.logprobs(), []
    if case.folder:
        Path(case.folder).mkdir()
        run.engine.save(Path(case.folder))
    for folder in json.loads((out / "refused.json").read_text()):
        try:
            run.engine.load(Path(folder))
            said.append("nothing")
        except WrongState as error:
            said.append(error.message)
    np.testing.assert_array_equal(run.logprobs(), before)
    (out / f"{case.name}.txt").write_text("\n".join(said))
    run.close()


def main(cases: Sequence[Case], out: Path) -> None:
    """Run the cases in their order."""
    for case in cases:
        began = time.monotonic()
        if case.does == "refuse":
            refuse(case, out)
        else:
            np.savez(out / case.name, **(resume if case.does == "resume" else perform)(case, out))
        sys.stderr.write(f"{case.name}: {time.monotonic() - began:.1f} s\n")


if __name__ == "__main__":
    main([Case(**case) for case in json.loads(Path(sys.argv[1]).read_text())], Path(sys.argv[2]))
