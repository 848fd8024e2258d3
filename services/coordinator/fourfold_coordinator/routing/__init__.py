"""Members of a run and the choice of a replica for each call."""
