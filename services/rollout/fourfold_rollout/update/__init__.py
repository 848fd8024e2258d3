"""Weight updates of an engine: the update's state machine and RolloutControlService."""
