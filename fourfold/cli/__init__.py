"""The command `fourfold`."""
