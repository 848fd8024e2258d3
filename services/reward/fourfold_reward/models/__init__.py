"""Scores texts with a reward model: a Hugging Face sequence classifier with one label.

    texts.py      jobs -> texts -> token ids, in a thread                     backend.py    the calls, on the event loop
    passes.py     the thread of the forward passes: rounds, batches, errors   load.py       the model on its devices
    packed.py     batches without padding                                     padded.py     every other architecture
    fused.py      faster norms and MLPs on CUDA

The package needs torch and transformers. `backend.py` imports them when the service starts.
"""
