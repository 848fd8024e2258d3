"""Tensor code that trainer and reference share (extra `torch`), so that their numbers can be compared."""
