"""The vLLM engine; only this package of the service imports vLLM. Empty: `environment` must run before that import."""
