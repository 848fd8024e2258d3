"""Measures the CPU time of traces: of the coordinator per sample, and of a span; and that of a scrape."""
