"""The training loop: collects a batch, trains, publishes, evaluates."""
