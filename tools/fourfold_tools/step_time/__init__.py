"""Predicts the time of a training step for `fourfold plan`, from a run's metrics or from data sheets."""
