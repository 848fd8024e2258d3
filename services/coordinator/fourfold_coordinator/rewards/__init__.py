"""The scorers of a run: how samples are scored, how scores are mixed, and how scorers are replaced."""
