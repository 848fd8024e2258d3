"""`fourfold bench reward`: the cost of scoring in a reward service, and what samples that hang do to the others."""
