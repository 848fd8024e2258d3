"""`fourfold bench reward-model`: a reward model in the reward service, beside plain transformers."""
