"""Tests; `tests.tiny_models` and `tests.fakes` are shared by them."""
