"""Master weights at each ZeRO stage, the Muon optimizer, and the moving average of the weights."""
