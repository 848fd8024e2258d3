"""Tests; `tests.support.tiny_models` and `tests.fakes` are shared by them."""
