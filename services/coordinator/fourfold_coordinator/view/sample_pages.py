"""The pages of trajectories: search with filters, and one trajectory with its tokens, turns, group and prompt."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final
from urllib.parse import urlencode

import numpy as np
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from fourfold.algorithm.advantages.base import ScoredSamples
from fourfold.config import Config
from fourfold.model.tokenizer import Tokenizer

from ..state.sample_tokens import TokenSegment
from ..state.trajectory_index import ORDERS, SampleQuery, SampleRow
from .pages import head, run_of, whole_number
from .row_pages import rows
from .templates import render

PAGE_ROWS: Final = 50
PAGE_TOKENS: Final = 2000
"""Tokens of a trajectory on one page."""
PAGE_CHARACTERS: Final = 20_000
"""Characters of a text on one page, of a trajectory without token values."""
_SHADES: Final = 10  # classes p0 ... p9 of log-probabilities
_NATS_PER_SHADE: Final = 0.5
_VERSIONS: Final = 6  # classes v0 ... v5, in turn
_NUMBERS: Final[Mapping[str, type[int] | type[float]]] = {
    "step_from": int, "step_to": int, "score_from": float, "score_to": float, "tokens_from": int, "tokens_to": int,
    "lag_from": int, "prompt_key": int,
}  # fmt: skip
_LIMIT: Final = 2**62  # limit of numbers in an address: SQLite has 64 bits


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """One token of a page."""

    text: str
    kind: str  # classes of the element
    title: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSpan:
    """Consecutive tokens that the model either sampled, as one turn, or read."""

    sampled: bool
    segment: int
    number: int  # number of the sampled turn from 1; 0 for tokens that the model read
    count: int  # tokens of the whole span
    tokens: list[Token]


def samples(request: Request) -> Response:
    """Show the trajectories that fit a search."""
    reader = run_of(request)
    batch = reader.recipe().get("batch")  # not `config()`: it is None with a loss of a file, which rows do not need
    if isinstance(batch, dict) and batch.get("rows_per_step"):
        return rows(request)
    query = parse_query(request)
    page = whole_number(request, "page") or 1
    index = reader.index()
    found = index.search(query, limit=PAGE_ROWS, skip=PAGE_ROWS * (page - 1))
    scorers, sources, reasons, last = index.choices()
    pending = index.pending_bytes()
    follows = reader.state() == "running" and page == 1 and not query.restricts()
    given = [(key, value) for key, value in request.query_params.multi_items() if value and key != "page"]
    return render(
        "samples.html",
        request,
        **{**head(reader), "live": follows or pending > 0},
        rows=found.rows,
        count=found.count,
        capped=found.capped,
        page=page,
        more=f"{urlencode([*given, ('page', page + 1)])}" if len(found.rows) == PAGE_ROWS else "",
        fewer=f"{urlencode([*given, ('page', page - 1)])}" if page > 1 else "",
        given=dict(given),
        scorers=scorers,
        sources=sources,
        reasons=reasons,
        orders=list(ORDERS),
        last=last,
        pending=pending,
    )


def parse_query(request: Request) -> SampleQuery:
    """Return the search of an address; raise HTTPException for a key that is unknown, or a value that is no number."""
    values, known = dict[str, Any](), [f.name for f in fields(SampleQuery)]
    if unknown := next((key for key in request.query_params if key not in (*known, "page")), ""):
        raise HTTPException(400, f"a search has no key {unknown!r}; it has text, page, and {', '.join(known[1:])}")
    for key in known:
        text = request.query_params.get(key, "").strip() if key != "text" else request.query_params.get(key, "")
        if not text:
            continue
        values[key] = text
        if kind := _NUMBERS.get(key):
            try:
                values[key] = kind(text)
            except ValueError:
                raise HTTPException(400, f"{key} = {text!r} is no number; correct it, or leave it empty") from None
            if not math.isfinite(values[key]) or (kind is int and not -_LIMIT < values[key] // 2 < _LIMIT):
                raise HTTPException(400, f"{key} = {text!r} is too large; correct it, or leave it empty")
    if values.get("order", "newest") not in ORDERS:
        raise HTTPException(400, f"order = {values['order']!r} is unknown; choose one of {', '.join(ORDERS)}")
    return SampleQuery(**values)


def sample(request: Request) -> Response:
    """Show one trajectory."""
    reader = run_of(request)
    index = reader.index()
    name = request.path_params["sample"]
    row = index.find(name)
    if row is None:
        wait = "the index is being built, load this page again; else, " if index.pending_bytes() else ""
        raise HTTPException(404, f"no trajectory {name!r}: {wait}a restore removes those after its checkpoint")
    begin = whole_number(request, "from") or 0
    group = index.group(row)
    config = reader.config()
    advantages = compare_group(config, group)
    tokenizer, damage, segments = reader.tokenizer(), "", list[TokenSegment]()
    try:
        segments = index.tokens(name)
    except ValueError as error:
        damage = str(error)
    total = sum(len(segment.token_ids) for segment in segments)
    token_spans = list(cut_spans(segments, row.line.version_spans, tokenizer, begin))
    completion = row.line.completion
    size = PAGE_TOKENS if segments else PAGE_CHARACTERS
    length = total if segments else len(completion)
    same = index.same_prompt(row)
    return render(
        "sample.html",
        request,
        **{**head(reader), "live": False},
        row=row,
        token_spans=token_spans,
        has_texts=tokenizer is not None,
        segment_count=len(segments),
        damage=damage,
        text=completion[begin : begin + PAGE_CHARACTERS],
        begin=begin,
        end=min(begin + size, length),
        length=length,
        before=max(begin - size, 0) if begin else None,
        after=begin + size if begin + size < length else None,
        unit="tokens" if segments else "characters",
        advantage=advantages.get(row.sample_id),
        estimator=config.algorithm.advantage.kind if config else "",
        group=[(each, advantages.get(each.sample_id)) for each in group],
        same=same,
        pair=(same[0], same[-1]) if len(same) > 1 else None,
    )


def compare_group(config: Config | None, group: Sequence[SampleRow]) -> dict[str, float]:
    """Return the advantage of each trained trajectory of a group, from the scores, by the estimator of the recipe.

    Additions of the trainer are left out: rewards of single turns, shaping, KL penalties, whitening over the batch.
    Empty for estimators that do not compare whole samples of a prompt.
    """
    trained = [row for row in group if not row.dropped and row.score is not None]
    if config is None or not trained or not config.algorithm.compares_samples:
        return {}
    estimator = config.algorithm.advantage
    if estimator.compares_terms or estimator.compares_turns or estimator.compares_tokens:
        return {}
    greedy = next((row.score for row in group if row.dropped == "BASELINE"), None)
    if estimator.needs_greedy_sample and greedy is None:
        return {}
    batch = ScoredSamples(
        scores=np.array([row.score for row in trained], np.float64),
        groups=[row.group_id for row in trained],
        lengths=np.array([row.tokens for row in trained], np.int64),
        greedy_scores=None if greedy is None else np.full(len(trained), greedy, np.float64),
    )
    return dict(zip((row.sample_id for row in trained), estimator.compare(batch).tolist(), strict=True))


def cut_spans(
    segments: Sequence[TokenSegment], spans: Sequence[tuple[int, int]], tokenizer: Tokenizer | None, begin: int
) -> Iterator[TokenSpan]:
    """Yield the spans of a trajectory with their tokens on the page that starts at token `begin`.

    `spans` are [policy version, tokens] over all segments.
    """
    ends = list(itertools.accumulate(count for _, count in spans))
    versions = [*(version for version, _ in spans), -1]  # -1: beyond the last span
    place, number = 0, 0
    for segment_index, segment in enumerate(segments):
        sampled = ~np.isnan(segment.logprobs)
        edges = [0, *(np.flatnonzero(np.diff(sampled)) + 1).tolist(), len(sampled)]
        for first, end in itertools.pairwise(edges):
            own = bool(sampled[first])
            number += own
            # Decode only the tokens of the page.
            low, high = max(first, begin - place), min(end, begin + PAGE_TOKENS - place)
            tokens = [
                _token(segment, index, versions[bisect_right(ends, place + index)], tokenizer)
                for index in range(low, high)
            ]
            if tokens:
                yield TokenSpan(
                    sampled=own, segment=segment_index, number=number if own else 0, count=end - first, tokens=tokens
                )
        place += len(segment.token_ids)


def _token(segment: TokenSegment, index: int, version: int, tokenizer: Tokenizer | None) -> Token:
    token_id, logprob = int(segment.token_ids[index]), float(segment.logprobs[index])
    text = f"[{token_id}]"
    if tokenizer is not None:
        added = tokenizer.added_text(token_id)
        text = tokenizer.token_bytes(token_id).decode(errors="replace") if added is None else added
    if math.isnan(logprob):
        return Token(text=text, kind="read", title=f"token {token_id}, not sampled")
    shade = min(int(-logprob / _NATS_PER_SHADE), _SHADES - 1) if math.isfinite(logprob) else _SHADES - 1
    title = f"token {token_id}: {logprob:.3g} nats, {math.exp(min(logprob, 0.0)):.1%}; version {version}"
    return Token(text=text, kind=f"p{max(shade, 0)} v{version % _VERSIONS}", title=title)
