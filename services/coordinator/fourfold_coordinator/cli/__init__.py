"""The commands `fourfold run`, `watch`, `weights` and `chat`."""
