"""The only place of this package that imports vLLM. Nothing is imported here: `environment` must be set first."""
