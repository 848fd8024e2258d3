"""Overrides of vLLM's private code; README.md lists what each one patches, its gain and its switch."""
