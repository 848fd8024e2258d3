"""Transports of weights: CUDA IPC, NCCL, shared memory and gloo."""
