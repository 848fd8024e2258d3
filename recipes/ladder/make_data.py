"""Writes the data of the ladder beside this file: python recipes/ladder/make_data.py

All questions are sums and differences, each in one file alone.

conversations.jsonl   answers in five forms: the number alone, or in one of four sentences
pairs.jsonl           chosen: the number alone; rejected: the same number in a sentence
held_out_pairs.jsonl  the same with other questions
"""

import json
import random
from collections.abc import Iterable
from itertools import product
from pathlib import Path

FOLDER = Path(__file__).parent
SUMS = ("{a} + {b} =", "What is {a} plus {b}?", "Add {a} and {b}.")
DIFFERENCES = ("{a} - {b} =", "What is {a} minus {b}?", "Take {b} from {a}.")
SENTENCES = ("The answer is {n}.", "It is {n}.", "I think it is {n}.", "That makes {n}.")
CONVERSATIONS, PAIRS, HELD_OUT = 384, 256, 72


def questions(draw: random.Random) -> list[tuple[str, int]]:
    """Return distinct questions with their results, in random order."""
    found = []
    for a, b in product(range(10, 30), range(2, 10)):
        found += [(text.format(a=a, b=b), a + b) for text in SUMS]
        found += [(text.format(a=a, b=b), a - b) for text in DIFFERENCES]
    return draw.sample(found, CONVERSATIONS + PAIRS + HELD_OUT)


def write(name: str, rows: Iterable[object]) -> None:
    (FOLDER / name).write_text("".join(json.dumps(row) + "\n" for row in rows))


def conversation(question: str, answer: str) -> object:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def main() -> None:
    draw = random.Random(17)
    asked = questions(draw)
    forms = ("{n}", *SENTENCES)
    write("conversations.jsonl", (conversation(q, draw.choice(forms).format(n=n)) for q, n in asked[:CONVERSATIONS]))
    pairs = [{"prompt": q, "chosen": f"{n}", "rejected": draw.choice(SENTENCES).format(n=n)} for q, n in asked]
    write("pairs.jsonl", pairs[CONVERSATIONS:-HELD_OUT])
    write("held_out_pairs.jsonl", pairs[-HELD_OUT:])


if __name__ == "__main__":
    main()
