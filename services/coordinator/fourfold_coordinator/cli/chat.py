"""`fourfold chat RUN_DIR|MODEL_DIR`: chats with a model through a rollout service, like any agent.

For a run, the chat uses the trained model with the settings of its training: system message, chat template or plain
texts, temperature, stop tokens, and the length of an answer. The context length is that of the run, but at least 4096
tokens if the model allows. The chat marks answers that were cut.

The command starts a service for the chat, or uses a running one (`--target`). Prompts and answers travel as token ids:
the next prompt is all ids so far plus the ids of the new turn. The model's answers are never tokenised again, because
that could give other ids than the model sampled.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Final

from fourfold import config as configuration
from fourfold.cli.numbers import number, whole
from fourfold.config import Config
from fourfold.config.table import MIN_TEMPERATURE
from fourfold.errors import ConfigError, WrongState
from fourfold.host.process import Command, Supervisor
from fourfold.model import folder as model_folder
from fourfold.model.tokenizer import Tokenizer
from fourfold.rollout.client import RolloutClient
from fourfold.rollout.v1 import rollout_service_pb2 as pb
from fourfold.security.tokens import read_token
from fourfold.text import clean, printable

from ..data.question import last_message
from ..launch.exports import way_to_export
from ..launch.run_folder import find_run
from ..launch.run_names import CONFIG_FILE, MODEL_FOLDER, REPORT_FILE
from .evaluate import newest_model
from .summary import as_reward_model

_MEMBER: Final = "chat-rollout"
_START_SECONDS: Final = 600.0
_ANSWER_SECONDS: Final = 600.0
_INFO_SECONDS: Final = 10.0
_MAX_CONTEXT: Final = 4096  # a chat is longer than the prompts of most runs; a larger limit of the run is kept
_MAX_TOKENS: Final = 256
_TOKEN_VARIABLE: Final = "FOURFOLD_TOKEN"  # as in examples/
_SHOWN: Final = 200  # most characters shown of a text of the run
_PLACEHOLDER: Final = "\u2042answer\u2042"  # marks the answer in a rendered template, to find the text after it
_HELP: Final = "An empty line or Ctrl-D ends the chat, /new starts a new one, Ctrl-C stops an answer."
_PLAIN_NOTE: Final = "The model was trained on plain texts: each line is a prompt of its own, without the lines before."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", help="folder of a run, such as runs/quickstart, a model folder, hf:OWNER/NAME or builtin:NAME"
    )
    parser.add_argument("--target", default="", metavar="HOST:PORT", help="a rollout service that runs already")
    parser.add_argument("--ca", type=Path, metavar="FILE", help="ca.pem of that service's deployment")
    parser.add_argument(
        "--token",
        default="",
        help=f"bearer token for its public port, or @FILE; with --ca, the default is that of ${_TOKEN_VARIABLE}",
    )
    parser.add_argument("--system", help="system message; default: that of the run, or none")
    parser.add_argument("--temperature", type=number, help="0: greedy decoding; default: that of the run, or 1")
    parser.add_argument(
        "--max-tokens",
        type=whole,
        help=f"maximum length of an answer, whose end says if it was cut there; default: that of the run, or "
        f"{_MAX_TOKENS}",
    )


def main(args: argparse.Namespace) -> int:
    """Chat until the input ends; return the exit code."""
    if args.max_tokens is not None and args.max_tokens < 1:
        raise ConfigError(
            f"--max-tokens {args.max_tokens}: an answer has at least one token; raise it, or leave it out"
        )
    if args.temperature is not None and not (args.temperature == 0 or MIN_TEMPERATURE <= args.temperature <= 2):
        raise ConfigError(
            f"--temperature {args.temperature:g}: it must be {MIN_TEMPERATURE} to 2, or 0 for greedy decoding"
        )
    if (args.ca or args.token) and not args.target:
        raise ConfigError("--ca and --token are for a service that runs already; add --target, or leave them out")
    args.token = read_token(args.token or (os.environ.get(_TOKEN_VARIABLE, "") if args.ca else ""))
    source = use_run(args, find_run(Path(args.model))) or args.model
    notes = run_notes(args.system or "", Path(source).parent)
    folder = model_folder.resolve(source)
    tokenizer = Tokenizer.load(folder, date=args.date)
    conversation = Conversation(tokenizer, system=args.system or "", chat=args.chat)
    notes += [] if args.chat else [_PLAIN_NOTE]
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # raises KeyboardInterrupt
    try:
        if args.target:
            return _chat(args, conversation, args.target, notes)
        with _service(folder, args.max_tokens, args.max_context) as target:
            return _chat(args, conversation, target, notes)
    except KeyboardInterrupt:
        print()
        return 0


def use_run(args: argparse.Namespace, folder: Path) -> str:
    """Take the settings that the command line leaves open from a run; return its model, or "" if it is no run.

    `folder` is that of the run, or one of its exported models. `args` also gets `chat`, `date`, `stop_token_ids` and
    `max_context`, which no option sets.
    """
    args.chat, args.date, args.stop_token_ids, args.max_context = True, "", (), _MAX_CONTEXT
    is_run = (folder / CONFIG_FILE).is_file()  # the path may name an export of a run
    run_dir = folder.parent if not is_run and folder.name.startswith(MODEL_FOLDER) else folder
    if not (run_dir / CONFIG_FILE).is_file():
        args.temperature = 1.0 if args.temperature is None else args.temperature
        args.max_tokens = _MAX_TOKENS if args.max_tokens is None else args.max_tokens
        return ""
    model = folder if run_dir != folder else newest_model(run_dir)
    if not model.is_dir():
        raise ConfigError(
            f"{run_dir} has no folder `{model.name}` yet: the model is exported at the end of a run, and every "
            f"checkpoint.export_every_steps; {way_to_export(run_dir)}"
        )
    config = configuration.load(run_dir / CONFIG_FILE)
    if (loss := config.algorithm.loss).trains == "scores":
        raise ConfigError(
            f"{run_dir} trained a reward model, which scores texts and writes none; use it in the recipe of another "
            f"run: [reward] model = {as_reward_model(model, config.data.separator if loss.reads == 'steps' else '')}"
        )
    args.chat, args.stop_token_ids = config.data.chat, config.sampling.stop_token_ids
    args.date = configuration.fix_date(config, run_dir).data.date
    args.max_context = max(config.model.max_context_tokens, _MAX_CONTEXT)
    if args.system is None:
        args.system = config.data.system_prompt
    if args.temperature is None:
        args.temperature = config.sampling.temperature
    if args.max_tokens is None:
        args.max_tokens = config.sampling.max_new_tokens or _MAX_TOKENS  # a run of rows has none
    return str(model)


def run_notes(system: str, run_dir: Path) -> list[str]:
    """Return the system message and an example prompt of the run; a small model answers only prompts of this form."""
    lines = [f"System message: {clean(system, _SHOWN)}"] if system else []
    with suppress(OSError, ValueError, KeyError, TypeError, IndexError):  # no report yet, or no held-out prompts
        report = json.loads((run_dir / REPORT_FILE).read_text(encoding="utf-8"))
        example = " ".join(last_message(report["answers_after"][0]["prompt"]).split())
        lines.append(f"The model was trained on prompts of this form: {clean(example, _SHOWN)}")
    return lines


class Conversation:
    """The token ids of a chat."""

    def __init__(self, tokenizer: Tokenizer, *, system: str = "", chat: bool = True) -> None:
        """Begin a chat; without `chat`, each prompt is a plain text of its own, as with `data.chat = false`."""
        self.token_ids: list[int] = []  # prompts, answers, and the template's tokens around them
        self.tokenizer = tokenizer
        self._system, self._is_chat = system, chat

    def ask(self, text: str) -> list[int]:
        """Return the prompt that adds a turn of the user. The caller sets `token_ids` when it has the answer."""
        if not self._is_chat:  # the same text as data/load_prompts.py makes for training
            return self.tokenizer.encode("\n\n".join(filter(None, (self._system, text))), add_special=True)
        user = {"role": "user", "content": text}
        if not self.token_ids:
            system = [{"role": "system", "content": self._system}] if self._system else []
            return self.tokenizer.encode(self.tokenizer.render_chat([*system, user]))
        # Render a short chat to get the tokens between an answer and the next one: they are the same for any answer.
        turns = [{"role": "user", "content": "x"}, {"role": "assistant", "content": _PLACEHOLDER}, user]
        rest = self.tokenizer.encode(self.tokenizer.render_chat(turns).rpartition(_PLACEHOLDER)[2])
        last = self.token_ids[-1]
        if last in self.tokenizer.stop_token_ids and rest[:1] == [last]:
            rest = rest[1:]  # the model has sampled the stop token itself
        return [*self.token_ids, *rest]


class IncrementalDecoder:
    """Decodes token ids as they arrive; bytes of an unfinished character are held back."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.token_ids: list[int] = []
        self._tokenizer = tokenizer
        self._shown = ""

    def add(self, token_ids: Sequence[int]) -> str:
        """Append ids; return the text that they complete."""
        self.token_ids.extend(token_ids)
        text = self._tokenizer.decode(self.token_ids).rstrip("\ufffd")
        new, self._shown = text[len(self._shown) :], text
        return new


def _chat(args: argparse.Namespace, conversation: Conversation, target: str, notes: Sequence[str]) -> int:
    if sys.stdin.isatty():
        print("\n".join([*notes, _HELP]))
    with RolloutClient(target, token=args.token, certs=args.ca or "") as client:
        info = client.get_info(timeout=_INFO_SECONDS)
        if info.tokenizer_sha256 != conversation.tokenizer.sha256:
            raise WrongState(
                f"rollout service at {target} serves {info.model!r}, which has another tokenizer; give its model folder"
            )
        for line in _lines():
            if line == "/new":
                conversation.token_ids = []
                continue
            prompt = conversation.ask(line)
            room = info.max_context_tokens - len(prompt)
            if room < 1:
                print(f"[the context of {info.max_context_tokens} tokens is full; /new starts a new chat]")
                continue
            params = pb.SamplingParams(
                temperature=args.temperature,
                max_tokens=min(args.max_tokens, room),
                stop_token_ids=args.stop_token_ids,
            )
            decoder = IncrementalDecoder(conversation.tokenizer)
            reason = pb.FINISH_REASON_UNSPECIFIED
            try:
                with closing(client.stream(prompt, params, timeout=_ANSWER_SECONDS)) as chunks:
                    for chunk in chunks:
                        print(printable(decoder.add(chunk.token_ids.tolist())), end="", flush=True)
                        reason = chunk.finish_reason
                if reason == pb.FINISH_REASON_LENGTH:
                    full = f"the context of {info.max_context_tokens} tokens is full; /new starts a new chat"
                    why = full if room < args.max_tokens else "--max-tokens raises it"
                    print(f" [cut at {params.max_tokens} tokens; {why}]", end="")
                print(flush=True)
            except KeyboardInterrupt:
                print(" [stopped]")
            finally:  # after Ctrl-C the conversation keeps the part that arrived
                conversation.token_ids = [*prompt, *decoder.token_ids]
    return 0


@contextmanager
def _service(folder: Path, max_tokens: int, max_context: int) -> Iterator[str]:
    """Run a rollout service for one model folder within the block; yield its address."""
    with tempfile.TemporaryDirectory(prefix="fourfold-chat-") as temporary:
        recipe = Path(temporary) / "chat.toml"
        recipe.write_text(configuration.dump(_recipe(folder, max_tokens, max_context)), encoding="utf-8")
        supervisor = Supervisor(Path(temporary))
        print(f"Loading {folder} ...", file=sys.stderr, flush=True)
        began = time.monotonic()
        try:
            argv = (sys.executable, "-m", "fourfold", "serve", "rollout", str(recipe), "--member-id", _MEMBER)
            supervisor.start(Command(name=_MEMBER, argv=argv))
            target = supervisor.wait_ready([_MEMBER], timeout_seconds=_START_SECONDS)[_MEMBER]
            print(f"ready after {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
            yield target
        finally:
            supervisor.stop()


def _recipe(folder: Path, max_tokens: int, max_context: int) -> Config:
    """Return a recipe for the rollout service, which ignores the tables of the other services."""
    limit = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("max_position_embeddings")
    context = min(int(limit or max_context), max_context)
    if max_tokens >= context:
        raise ConfigError(f"--max-tokens = {max_tokens}: must be below the context of {context} tokens; lower it")
    from fourfold.host.hardware import visible_gpus

    return Config.model_validate(
        {
            "name": "chat",
            "steps": 1,
            "model": {"source": str(folder), "max_context_tokens": context},
            "data": {"train": {"path": "none.jsonl"}},
            "batch": {"prompts_per_step": 1, "group_size": 2, "tokens_per_micro_batch": context},
            "sampling": {"max_new_tokens": max_tokens},
            "rollout": {
                "gpus_per_replica": 1 if visible_gpus() else 0,
                "enforce_eager": True,  # for a single reader, a fast start matters more than fast decoding
                "max_concurrent_samples": 4,
            },
        }
    )


def _lines() -> Iterator[str]:
    """Yield the user's lines: on a terminal until an empty line or the end, from a pipe all that are not empty."""
    interactive = sys.stdin.isatty()
    with suppress(EOFError):
        while True:
            if line := input("> " if interactive else "").strip():
                yield line
            elif interactive:
                return
