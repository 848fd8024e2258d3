"""Measures the update of a running engine's weights (`fourfold bench weights`)."""
