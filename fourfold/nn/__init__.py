"""Tensor code that trainer and reference share (extra `torch`), so that their numbers can be compared.

batching.py          packs samples of any length into batches under a token budget (numpy only)
attention.py         restricts attention to each sample of a packed batch
forward.py           computes log-probabilities, entropies or values at the asked rows of a batch
sequence.py          divides a packed batch among several ranks
router.py            balances the load of the experts of a mixture
logprobs.py          computes log-probabilities and entropies from hidden states, a few rows at a time
logprob_kernels.py   does so on CUDA
"""
