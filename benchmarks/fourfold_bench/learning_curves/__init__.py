"""`fourfold bench learning-curves`: what a model learns at several policy lags."""
