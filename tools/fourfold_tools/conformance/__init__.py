"""Checks services of other people against the contract: `fourfold conformance`."""
