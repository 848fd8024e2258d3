"""Bounds of numbers that grow during a run (steps, versions, epochs, parts), and limits that several services check.

The numbers travel as int64. Services add 1 to them, so a value at the end of int64 would break every later response. No
run reaches 2^53, below which numbers are also exact in languages that store them as doubles (JSON, JavaScript, Lua).
"""

from __future__ import annotations

import re
from typing import Final

from fourfold.errors import InvalidInput

MAX_NUMBER: Final = 2**53
# The highest version that a caller may give to the weights. All later versions stay below MAX_NUMBER.
MAX_RAISED_VERSION: Final = 2**52
# Most receivers of a group, and most groups, of a weight transfer. Each takes memory before the first one connects.
MAX_RECEIVERS: Final = 4096
# Tokens of ScoreTokens. vLLM computes the logits of all positions at once: float32 [tokens, vocabulary].
MAX_SCORED_TOKENS: Final = 4096
# Samples of one Generate call of an agent or of an engine.
MAX_SAMPLES_PER_CALL: Final = 256
# Stop strings of a turn, and characters of each. Engines get none: the gateway finds them in the text.
MAX_STOPS: Final = 16
MAX_STOP_CHARACTERS: Final = 256
# Encoded bytes, metrics and names of metrics of an agent's trajectory: its gateway checks them, and then the run.
MAX_TRAJECTORY_BYTES: Final = 8 << 20
MAX_TEACHER_TOKENS: Final = 64  # likely tokens of a teacher in place of one token
MAX_TRAJECTORY_METRICS: Final = 64
TRAJECTORY_METRIC: Final = re.compile(r"[A-Za-z0-9_./-]{1,63}")
MAX_FLOAT32: Final = 3.4028234663852886e38  # largest reward
# Experiences in one message of TrainStep. A step has any number of messages, and a sample is in one.
TRAIN_MESSAGE_BYTES: Final = 4 << 20
# A chunk costs about 0.3 ms beside its bytes, and the time of one chunk is added to a transfer for each engine of a
# chain. So large shards have large chunks.
_CHUNK_BYTES: Final = (1 << 20, 8 << 20)
_CHUNKS: Final = 256
_CHUNK_MULTIPLE: Final = 64  # as the offsets of tensors in a shard, so that no chunk ends within an element


def check_number(value: int, name: str, *, least: int = 0, most: int = MAX_NUMBER) -> int:
    """Return a number of a request, or raise InvalidInput when it is outside [least, most]."""
    if value < least:
        raise InvalidInput(f"{name} is {value}; it must be at least {least}")
    if value > most:
        raise InvalidInput(f"{name} is {value}; it must be at most {most}")
    return value


def chunk_bytes(shard_bytes: int) -> int:
    """Return the bytes of a chunk in which a shard travels along a chain of engines; all members derive it alike."""
    least, most = _CHUNK_BYTES
    return min(max(shard_bytes // _CHUNKS, least), most) // _CHUNK_MULTIPLE * _CHUNK_MULTIPLE
