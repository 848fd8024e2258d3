"""The page *Samples* of a run of rows: rows from its token stores as text, with the tokens of the loss colored."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path
from typing import Final

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from fourfold.errors import FourfoldError
from fourfold.plan.preflight import RenderedRow

from ..launch.run_names import LEDGER_FILE
from ..rows.describe import render_unit
from ..rows.open_rows import STORES_KEY
from ..rows.store import TokenStore, open_store
from ..state.ledger import read_value
from .pages import head, run_of
from .templates import render

_UNITS: Final = 10
_CHARACTERS: Final = 20_000  # of a sample on the page


def rows(request: Request) -> Response:
    """Show some rows of a run at random, or with ?order=longest the longest ones."""
    reader, longest = run_of(request), request.query_params.get("order") == "longest"
    tokenizer, stores, fault = reader.tokenizer(), list[TokenStore](), ""
    try:
        folders = "" if reader.peer else read_value(reader.folder / LEDGER_FILE, STORES_KEY)
        stores += [open_store(Path(each), verify=False) for each in json.loads(folders or "[]")]
    except (FourfoldError, OSError, ValueError, TypeError, sqlite3.Error) as error:
        fault = getattr(error, "message", str(error))
    count = sum(map(len, stores))
    if longest:
        lengths = [np.bincount(store.index["unit"], weights=store.index["length"]) for store in stores]
        chosen = np.argsort(-np.concatenate([*lengths, np.empty(0)]), kind="stable")[:_UNITS]
    else:
        chosen = np.random.default_rng().choice(count, min(_UNITS, count), replace=False)
    firsts = np.cumsum([0, *map(len, stores)])
    found = list[RenderedRow]()
    for unit in chosen:
        if tokenizer is None:
            break
        number = int(np.searchsorted(firsts, unit, side="right")) - 1
        store = stores[number]
        found += render_unit(store, store.samples_of(int(unit - firsts[number])), tokenizer)
    return render(
        "rows.html",
        request,
        **{**head(reader), "live": False},
        found=found,
        characters=_CHARACTERS,
        fault=fault,
        has_texts=tokenizer is not None,
        count=count,
        longest=longest,
    )
