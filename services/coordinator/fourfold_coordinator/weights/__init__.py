"""Brokers weight updates between the trainer and the engines."""
