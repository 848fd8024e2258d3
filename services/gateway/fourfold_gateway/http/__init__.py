"""Serves the gateway over HTTP, in the formats of the OpenAI and Anthropic APIs."""
