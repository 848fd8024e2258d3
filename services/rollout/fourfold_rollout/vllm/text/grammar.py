"""Compiles grammars with xgrammar for one model, and follows one grammar along the tokens of a sample.

Free text allows the tokens that no grammar allows, too: padding of the vocabulary and tokens without text. A grammar
would otherwise change the distribution of every token, also where it constrains nothing.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch
import transformers
import xgrammar

from fourfold.errors import InvalidInput
from fourfold.text import clean
from fourfold_rollout.engine import GrammarConstraint

_CACHE_BYTES: Final = 256 << 20
_WORD_BITS: Final = 32
# A structural tag whose trigger no text contains, so that all of it is free text.
_FREE_TEXT: Final = json.dumps(
    {
        "type": "structural_tag",
        "format": {
            "type": "triggered_tags",
            "triggers": ["\ue000\ue001\ue000"],
            "tags": [
                {
                    "begin": "\ue000\ue001\ue000",
                    "content": {"type": "const_string", "value": "x"},
                    "end": "\ue001",
                }
            ],
        },
    }
)


class GrammarCompiler:
    """Compiles grammars for the tokenizer in a model folder. It may be used by one thread at a time."""

    def __init__(self, folder: Path, *, threads: int) -> None:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
        self.vocabulary_size = vocabulary_size = int(config.get_text_config().vocab_size)
        info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocabulary_size)
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=threads, cache_limit_bytes=_CACHE_BYTES)
        self._never: dict[tuple[int, ...], Any] = {}

    def start(self, constraint: GrammarConstraint, stops: Sequence[int], accepted: Sequence[int]) -> TokenGrammar:
        """Return the state of a grammar after the tokens `accepted`; one of `stops` ends its text.

        Raises InvalidInput: the grammar does not compile, or does not accept these tokens.
        """
        try:
            compiled = self._compile(constraint)
        except Exception as error:  # xgrammar raises plain RuntimeErrors
            raise InvalidInput(f"sampling_params.grammar does not compile: {_reason(error)}") from None
        grammar = TokenGrammar(self._matcher(compiled, stops), self._never_allowed(tuple(stops)))
        for position, token in enumerate(accepted):
            if not grammar.accept(token):
                raise InvalidInput(
                    f"the grammar does not accept token {token}, number {position} of the last {len(accepted)} prompt "
                    f"tokens; grammar_prefix_count must be the number of tokens that were sampled under this grammar"
                )
        if grammar.ended:
            raise InvalidInput("the last prompt token ends the text of the grammar; nothing is left to sample")
        return grammar

    def _compile(self, constraint: GrammarConstraint) -> Any:
        compiler, text = self._compiler, constraint.text
        match constraint.kind:
            case "json_schema":
                return compiler.compile_json_schema(text)
            case "regex":
                return compiler.compile_regex(text)
            case "ebnf":
                return compiler.compile_grammar(text)
            case "structural_tag_json":
                return compiler.compile_structural_tag(text)

    def _matcher(self, compiled: Any, stops: Sequence[int]) -> Any:
        return xgrammar.GrammarMatcher(compiled, override_stop_tokens=list(stops))

    def _never_allowed(self, stops: tuple[int, ...]) -> Any:
        """Return the bits of the tokens that free text does not allow: int32 [words]."""
        if stops not in self._never:
            row = xgrammar.allocate_token_bitmask(1, self.vocabulary_size)
            free = self._compiler.compile_structural_tag(_FREE_TEXT)
            self._matcher(free, stops).fill_next_token_bitmask(row, 0)
            self._never[stops] = ~row[0]
        return self._never[stops]


class TokenGrammar:
    """The state of a grammar in one sample."""

    def __init__(self, matcher: Any, never: Any) -> None:
        self._matcher, self._never = matcher, never
        self._row: Any = None

    @property
    def ended(self) -> bool:
        """Whether a stop token was accepted."""
        return bool(self._matcher.is_terminated())

    def accept(self, token: int) -> bool:
        """Advance by a token; return False, without a change, if the grammar forbids it."""
        if not int(self._never[token // _WORD_BITS]) >> token % _WORD_BITS & 1:
            return bool(self._matcher.accept_token(token))
        if self._row is None:
            self._row = torch.empty_like(self._never).unsqueeze(0)
        return not self.fill(self._row, 0)  # it has no text

    def fill(self, bitmask: Any, index: int) -> bool:
        """Set the bits of the allowed tokens in a row of int32 [rows, words]; return whether any token is forbidden."""
        row = bitmask[index]
        self._matcher.fill_next_token_bitmask(bitmask, index)
        if bool(((row | self._never) == -1).all()):
            row.fill_(-1)
            return False
        return True


def _reason(error: Exception) -> str:
    """Return xgrammar's message without the place in its source."""
    text = clean(str(error), 1000)
    return text.split("] ", 1)[-1].split(": ", 1)[-1] if text.startswith("[") else text
