"""Sends the metrics of a run to TensorBoard, W&B, trackio and MLflow.

    metrics.jsonl --> one process for each sink (`process`), started and watched by the coordinator (`supervisor`)
                        new lines (`rows`) --> `Sink.log` --> tracker

A sink reads the file of the run, and the run never waits for it. A tracker that hangs, crashes or refuses affects only
the process of its sink. `fourfold log RUN SINK` sends missing steps, also after the end of the run.
"""
