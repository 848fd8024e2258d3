"""`fourfold plan`: derives from a recipe what a run does and what it needs."""
