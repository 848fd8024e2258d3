"""Shared tensor code (extra `torch`): batches of samples, and their log-probabilities under a causal LM.

    batching.py   samples of any length -> padded batches under a token budget   (numpy only)
    forward.py    batch -> hidden states -> log-probabilities at the asked rows
    logprobs.py   hidden states -> log-probabilities, a few rows of the vocabulary at a time

Trainer and reference use the same three files, so that their numbers can be compared.
"""
