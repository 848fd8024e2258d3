"""The weight plane: how new weights get from the trainer's ranks into every engine's workers.

    trainer rank                                                   engine worker
    WeightSource -> WeightSender -> Transport ~~~ bytes ~~~> Transport -> Applier -> the engine's model
    (source, zero3)  (sender)       (shm, gloo)                           (applier, vllm_worker)

Control goes through gRPC (the coordinator calls both sides), the bytes never do. Both sides
hold the same `Manifest`: tensors in checkpoint names and where each rank keeps which part of
them. Both sums up what they sent or loaded (`digest`), and an update counts only when all
digests agree.

Nothing is imported here, so that `host` and `answers` cost no torch.
"""
