"""One rank's policy and critic in DeepSpeed, ZeRO stages 0 to 3. The trainer imports `deepspeed` only here.

`rank_environment` must be set before this package is imported, because DeepSpeed chooses its device at import, and
`process_groups.join` must be called before the first model is made.
"""
