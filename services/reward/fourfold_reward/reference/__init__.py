"""The role `reference`: log-probabilities of given tokens under a frozen model. Needs torch and transformers."""
