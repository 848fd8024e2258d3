"""Trains with a custom loss, from a script or a notebook: teaches a model to answer in digits, not in words.

    fourfold serve trainer recipes/quickstart.toml --listen 127.0.0.1:50052
    python examples/custom_loss.py 127.0.0.1:50052 builtin:smollm2-135m-instruct

Nothing is sampled. Each question has a preferred answer and another one, and the loss of the pair is

    softplus(-margin),    margin = BETA * (log-probability of the preferred answer - that of the other one)

The trainer minimises `sum of weight * log-probability` over tokens. With the derivative of the loss with respect to
each log-probability as the weight of that token, the sum has the gradient of the loss, by the chain rule.

It needs `fourfold[tokenizer]` and a folder with the model's tokenizer, or builtin:NAME, which also needs
`fourfold-tools[quickstart]`.
"""

from __future__ import annotations

import sys

import numpy as np
from numpy.typing import NDArray

from fourfold import FourfoldError, Tokenizer, TrainerClient

# Question, preferred answer, the other answer.
PAIRS = (
    ("What is 3 * 4?", " 12", " twelve"),
    ("What is 2 * 5?", " 10", " ten"),
    ("What is 4 * 4?", " 16", " sixteen"),
    ("What is 6 * 5?", " 30", " thirty"),
)
STEPS = 10
BETA = 0.5


def pair_loss(totals: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
    """Return the mean loss of the pairs, and its derivative with respect to the log-probability of each answer.

    Args:
        totals: float64 [pairs, 2], log-probabilities of the preferred answer and of the other one.

    Returns:
        The loss, and the derivatives as float64 [pairs, 2].
    """
    margins = BETA * (totals[:, 0] - totals[:, 1])
    slopes = -BETA / (1 + np.exp(margins)) / len(margins)
    return float(np.logaddexp(0, -margins).mean()), np.stack([slopes, -slopes], 1)


def train(client: TrainerClient, tokenizer: Tokenizer) -> list[float]:
    """Train, and return the loss before each step."""
    rows, is_answer = list[NDArray[np.int32]](), list[NDArray[np.bool_]]()
    for question, *answers in PAIRS:
        prompt = tokenizer.encode(question)
        for answer in map(tokenizer.encode, answers):
            rows.append(np.array([*prompt, *answer], np.int32))
            is_answer.append(np.arange(len(rows[-1])) >= len(prompt))
    client.discard_gradient(timeout=60)  # a run that was interrupted may have left one
    first = (client.get_status(timeout=10)).step + 1
    losses = []
    for step in range(first, first + STEPS):
        found = client.forward(rows, timeout=600)
        totals = [float(row[mask].sum()) for row, mask in zip(found.logprobs, is_answer, strict=True)]
        loss, slopes = pair_loss(np.array(totals).reshape(-1, 2))
        weights = [slope * mask for slope, mask in zip(slopes.ravel(), is_answer, strict=True)]
        client.forward_backward(rows, weights, step=step, timeout=600)
        done = client.optim_step(step, timeout=600)  # with the recipe's learning rate and clipping
        sys.stdout.write(f"step {step}: loss {loss:.4f}, gradient {done.grad_norm:.3f}\n")
        losses.append(loss)
    return losses


def main(target: str, model: str) -> None:
    """Load the tokenizer, connect, and train."""
    tokenizer = Tokenizer.load(model)
    with TrainerClient(target) as client:
        train(client, tokenizer)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python examples/custom_loss.py HOST:PORT MODEL")
    try:
        main(*sys.argv[1:])
    except FourfoldError as error:
        sys.exit(f"custom_loss: {error}")
