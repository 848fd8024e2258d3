"""Tasks for agents: attempts of groups that gateways lease, and the trajectories that come back."""
