"""`fourfold bench engines`: many simulated engines on one coordinator."""
