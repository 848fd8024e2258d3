"""The gateway: the entry point of agents, which sample from the policy and hand in trajectories."""
