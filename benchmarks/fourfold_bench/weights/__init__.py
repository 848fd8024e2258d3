"""Measures the update of a running engine's weights (`fourfold bench weights`), alone or through the services.

benchmark   options, suites, table       direct     the library alone: rounds with `fourfold.weights.local`
services    the same through gRPC        engine     a vLLM that decodes all the time; worker: its side
rank_client, rank_process, zero3         the trainer's processes, and real ZeRO-3 in them
"""
