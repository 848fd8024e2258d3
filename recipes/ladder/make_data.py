"""Writes the data of the ladder beside this file: python recipes/ladder/make_data.py

conversations.jsonl   sums and differences, each answered by the number alone
pairs.jsonl           products of two digits from 2 to 9; chosen: the result; rejected: another number, or the question
held_out_pairs.jsonl  the same of 9 of the 28 products of two different digits, in both orders, which no other file has
"""

import json
import random
from itertools import combinations
from pathlib import Path

FOLDER = Path(__file__).parent
SUMS = ("{a} + {b} =", "What is {a} plus {b}?", "Add {a} to {b}.")
DIFFERENCES = ("{a} - {b} =", "What is {a} minus {b}?", "Subtract {b} from {a}.")
PRODUCTS = ("{a} * {b} =", "What is {a} times {b}?", "Multiply {a} by {b}.", "Compute {a} x {b}.")


def conversations(draw: random.Random) -> list[dict[str, object]]:
    rows = []
    for _ in range(512):
        a, b = draw.randint(10, 99), draw.randint(2, 9)
        text, answer = draw.choice([*((t, a + b) for t in SUMS), *((t, a - b) for t in DIFFERENCES)])
        question = {"role": "user", "content": text.format(a=a, b=b)}
        rows.append({"messages": [question, {"role": "assistant", "content": str(answer)}]})
    return rows


def pairs(products: list[tuple[int, int]], draw: random.Random, *, each: int) -> list[dict[str, object]]:
    rows = []
    for a, b in products:
        near = {a + b, a * (b + 1), a * (b - 1), (a + 1) * b, (a - 1) * b, a * b + 10, abs(a * b - 10), 10 * a + b}
        for text in PRODUCTS:
            question = text.format(a=a, b=b)
            wrong = [*map(str, sorted(near - {a * b})), str(draw.randint(2, 99)), str(draw.randint(2, 99)), question]
            wrong.remove(str(a * b)) if str(a * b) in wrong else None
            rows += [{"prompt": question, "chosen": str(a * b), "rejected": r} for r in draw.sample(wrong, each)]
    return rows


def write(name: str, rows: list[dict[str, object]]) -> None:
    (FOLDER / name).write_text("".join(json.dumps(row) + "\n" for row in rows))


draw = random.Random(17)
held_out = draw.sample(list(combinations(range(2, 10), 2)), 9)
both_orders = sorted({*held_out, *((b, a) for a, b in held_out)})
trained = [(a, b) for a in range(2, 10) for b in range(2, 10) if (a, b) not in both_orders]
write("conversations.jsonl", conversations(draw))
write("pairs.jsonl", pairs(trained, draw, each=2))
write("held_out_pairs.jsonl", pairs(both_orders, draw, each=1))
