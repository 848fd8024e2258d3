"""RolloutService: admission, sampling and streams."""
