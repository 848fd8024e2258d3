"""Commands of `fourfold` that this distribution registers."""
