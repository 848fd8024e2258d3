"""Shared tensor code (extra `torch`): packed samples, and what a causal LM says about them.

    batching.py   samples of any length -> packed batches under a token budget   (numpy only)
    attention.py  every sample of a packed batch attends to itself alone
    forward.py    batch -> hidden states -> log-probabilities, entropies or values at the asked rows
    sequence.py   several ranks share a packed batch, each with a slice of it
    router.py     the load of the experts of a mixture, and the loss that evens it
    logprobs.py   hidden states -> log-probabilities and entropies, a few rows of the vocabulary at a time; on CUDA with
                  logprob_kernels.py
    transfer.py   arrays to the device

Trainer and reference use the same files, so that their numbers can be compared.
"""
