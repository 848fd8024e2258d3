"""Traces of samples: spans (`spans.py`), their way through calls (`propagation.py`), and their export (`export.py`)."""
