"""`fourfold bench long-tail`: steps with completions of very different lengths, at several policy lags."""
