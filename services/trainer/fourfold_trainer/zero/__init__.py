"""Trains the policy and the critic of one rank with DeepSpeed, ZeRO stages 0 to 3. Only this package imports it.

`rank_environment` must be set before this package is imported, because DeepSpeed chooses its device at import, and
`process_groups.join` must be called before the first model is made.
"""
