"""Writes a model folder with random weights and a tokenizer of made-up words.

    python -m fourfold_bench.model FOLDER SHAPE CONTEXT

Word number i is the text `w<i>`, so that a text of n words has exactly n tokens. The weights are those that
transformers draws: the model knows nothing, and at temperature 1 its samples are of every token alike.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Final

from fourfold_bench.shapes import SHAPES, write_config

_SEED: Final = 0


def text(token_ids: list[int]) -> str:
    """Return the text that has these tokens."""
    return " ".join(f"w{token}" for token in token_ids)


def write(folder: Path, shape: str, *, context: int) -> None:
    """Write config.json, the weights in bfloat16 and the tokenizer.

    Args:
        folder: made if missing.
        shape: one of SHAPES.
        context: tokens that it must have positions for.
    """
    import torch
    import transformers

    write_config(folder, shape, context=context)
    torch.manual_seed(_SEED)
    make: Any = transformers.AutoModelForCausalLM
    make.from_config(transformers.AutoConfig.from_pretrained(folder), dtype=torch.bfloat16).save_pretrained(folder)
    # What transformers wrote of them has its defaults in it: ids that end a sample.
    (folder / "generation_config.json").unlink(missing_ok=True)
    write_config(folder, shape, context=context)
    _write_tokenizer(folder, SHAPES[shape]["vocab_size"])


def _write_tokenizer(folder: Path, words: int) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit

    tokenizer = Tokenizer(WordLevel({f"w{index}": index for index in range(words)}, unk_token="w0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))


if __name__ == "__main__":
    write(Path(sys.argv[1]), sys.argv[2], context=int(sys.argv[3]))
