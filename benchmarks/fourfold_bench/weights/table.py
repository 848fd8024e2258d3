"""Results as text: one configuration in a column of lines, several in a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

_MB: Final = 1e6


def print_table(documents: Sequence[dict[str, Any]]) -> None:
    """Print what matters of each result; milliseconds are median (95th percentile)."""
    if len(documents) == 1:
        rows = _rows(documents[0])
        width = max(len(name) for name, _ in rows)
        for name, value in rows:
            print(f"{name:{width}}  {value}")
        return
    columns = [dict(_rows(document)) for document in documents]
    names = list(dict.fromkeys(name for column in columns for name in column))
    table = [["", *(column["configuration"] for column in columns)]]
    table += [[name, *(column.get(name, "") for column in columns)] for name in names[1:]]
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    for row in table:
        print("  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())


def _rows(document: dict[str, Any]) -> list[tuple[str, str]]:
    results, parameters = document["results"], document["parameters"]
    plain, applied = results["plain"], results["applied"]
    rows = [
        ("configuration", document["benchmark"].removeprefix("weights-")),
        ("path", parameters["path"]),
        ("backend", parameters["backend"]),
        ("tensors, MB", f"{results['tensors']}, {results['bytes'] / _MB:.1f}"),
        ("in place / reloaded", f"{applied['direct']} / {applied['reload']}"),
        ("streams", str(parameters["streams"])),
        ("data: receive verb", f"{_ms(plain['receive'])} ms, {results['gigabytes_per_second']} GB/s"),
    ]
    if "worker" in plain:
        rows.append(("  in the worker", f"{_ms(plain['worker'])} ms: {_parts(plain)}"))
    rows += [
        ("stall of the engine", f"{_ms(plain['stall'])} ms"),
        ("longest gap of a client, above the usual", f"{_ms(plain['gap'])} ms"),
        ("usual gap between tokens", f"{results['token_gap']['median_ms']:.2f} ms"),
        ("begin, commit", f"{_ms(plain['begin'])}, {_ms(plain['commit'])} ms"),
        ("with sums: receive verb", f"{_ms(results['verified']['receive'])} ms"),
        ("join (open an epoch)", f"{_ms(results['open'])} ms"),
    ]
    if "tokens" in results:
        tokens = results["tokens"]
        rows.append(("tokens lost", f"{tokens['lost']} of {tokens['sampled']:,} sampled"))
    if "first_token" in results:
        worst = results["worst_round"]
        rows += [
            ("time to first token", f"{_ms(results['first_token'])} ms"),
            ("longest gap of a client / stall + 50", f"{worst['gap_ms']:.2f} / {worst['stall_ms'] + 50:.2f} ms"),
        ]
    if "without_data" in results:
        empty = results["without_data"]
        rows.append(("round without data", f"{_ms(empty['whole'])} ms, stall {_ms(empty['stall'])} ms"))
    for device, extra in results["gpu_mib"].items():
        rows.append((f"more memory on {device}", f"{extra['open']} MiB open, {extra['most']} MiB at most"))
    if "loop" in results:
        rows.append(("loop, tensor by tensor: stall", f"{_ms(results['loop']['stall'])} ms: {results['loop_ratio']} x"))
    return rows


def _ms(value: dict[str, Any]) -> str:
    return f"{value['median_ms']:.2f} ({value['p95_ms']:.2f})"


def _parts(plain: dict[str, Any]) -> str:
    prefix = "worker_"
    parts = {name.removeprefix(prefix): value for name, value in plain.items() if name.startswith(prefix)}
    return ", ".join(f"{name} {value['median_ms']:.2f}" for name, value in parts.items())
