"""RolloutService: admits calls, hands their samples to the engine and streams the tokens back."""
