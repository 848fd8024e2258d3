"""Sends the metrics of a run to TensorBoard, W&B, trackio and MLflow.

    metrics.jsonl --> one process for each sink (`process`), started and watched by the coordinator (`supervisor`)
                        new lines (`rows`) --> `Sink.log` --> tracker

A sink reads the file of the run, and nothing of the run waits for it. A tracker that hangs, crashes or refuses costs
only its own process. `fourfold log RUN SINK` sends what is missing, also of a run that has ended.
"""
