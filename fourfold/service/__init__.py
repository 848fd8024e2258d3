"""The process of a service: its life cycle and its membership in a run."""
