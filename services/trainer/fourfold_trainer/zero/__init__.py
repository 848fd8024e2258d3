"""One rank's models and optimizers in DeepSpeed, ZeRO stages 0 to 3. The only user of `deepspeed` here.

    group.py       the ranks of a process group meet
    ulysses.py     some of them share a row: sequence parallelism
    settings.py    DeepSpeed's settings, and the optimizer
    offload.py     what stays in main memory
    models.py      the model of a folder
    engine.py      one model and its optimizer: forward, backward, step, save, restore
    policy.py      log-probabilities, weights for the engines, export
    critic.py      values

The environment of `processes.environment` must be set before anything here is imported: the device
that DeepSpeed uses is chosen then. `join` comes before the first model.
"""
