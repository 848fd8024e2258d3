"""Commands beside a training run, which no service needs."""
