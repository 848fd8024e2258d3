"""Keeps the state of a run: the durable ledger and files, and what watchers see."""
