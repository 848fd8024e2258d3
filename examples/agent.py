"""An agent: sends one chat message to a rollout service's public port and prints the answer while it is sampled.

    python examples/agent.py 127.0.0.1:50060 certs/ca.pem builtin:smollm2-135m-instruct "What is 3 * 4?"

It needs `fourfold[tokenizer]`, the deployment's ca.pem, a folder with the model's tokenizer and chat template (or
builtin:NAME, which also needs `fourfold-tools[quickstart]`), and a bearer token. The token is read from FOURFOLD_TOKEN,
or asked for on the terminal.
"""

from __future__ import annotations

import getpass
import os
import sys

from fourfold import FourfoldError, RolloutClient, SamplingParams, Tokenizer


def ask(client: RolloutClient, tokenizer: Tokenizer, question: str) -> None:
    """Print the answer to one question."""
    if client.get_info().tokenizer_sha256 != tokenizer.sha256:
        sys.exit("agent: the rollout service serves a model with another tokenizer; name that model")
    prompt = tokenizer.encode(tokenizer.render_chat([{"role": "user", "content": question}]))
    ids, shown, version = list[int](), "", 0
    for chunk in client.stream(prompt, SamplingParams(temperature=0.7, max_tokens=64), timeout=120):
        ids += chunk.token_ids.tolist()
        text = tokenizer.decode(ids).rstrip("\ufffd")  # a character may be split over two tokens: wait for the rest
        sys.stdout.write(text[len(shown) :])
        sys.stdout.flush()
        shown, version = text, chunk.policy_version
    sys.stdout.write(f"\n[{len(ids)} tokens, sampled by policy version {version}]\n")


def main(target: str, authority: str, model: str, question: str) -> None:
    """Load the tokenizer, connect, and ask."""
    tokenizer = Tokenizer.load(model)
    token = os.environ.get("FOURFOLD_TOKEN") or getpass.getpass("Token: ")
    with RolloutClient(target, token=token, certs=authority) as client:
        ask(client, tokenizer, question)


if __name__ == "__main__":
    if len(sys.argv) != 5:
        sys.exit("usage: python examples/agent.py HOST:PORT CA.pem MODEL QUESTION")
    try:
        main(*sys.argv[1:])
    except FourfoldError as error:
        sys.exit(f"agent: {error}")
