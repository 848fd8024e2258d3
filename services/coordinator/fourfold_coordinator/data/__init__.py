"""Data sets, prompts and the filter of groups."""
