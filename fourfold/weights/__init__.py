"""Moves new weights from the trainer's ranks into the workers of every engine.

    trainer rank                                                   engine worker
    source -> sender -> transport ~~~~~~~~~ bytes ~~~~~~~~~> transport -> receiver -> apply -> the engine's model

Control calls go through gRPC (from the coordinator) or function calls (`local`); the bytes never do. Both sides hold
the same `Manifest`: the tensors by their checkpoint names, and which rank keeps which part of them. Both sides compute
a `digest`, and an update counts only if all digests agree.

This module imports nothing: `manifest`, `digest`, `worker_control` and `transport.locality` work without torch.
"""
