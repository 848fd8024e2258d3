"""Commands: run, watch, chat, weights."""
