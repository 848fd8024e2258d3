"""RolloutControlService: weight updates of the engine."""
