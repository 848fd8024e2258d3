"""A talk as token ids: nothing the model said is tokenised again, and the template stays whole."""

from __future__ import annotations

import argparse
import io
import json
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as RawTokenizer

from fourfold import config as configuration
from fourfold.errors import ConfigError
from fourfold.model.tokenizer import Tokenizer
from fourfold.rollout.client import CompletionChunk
from fourfold.rollout.v1 import rollout_service_pb2 as pb
from fourfold_coordinator.cli import chat
from fourfold_coordinator.cli.chat import Conversation, IncrementalDecoder
from fourfold_coordinator.launch.run_folder import locked
from fourfold_coordinator.launch.run_names import RUN_LOCK

TEMPLATE = (
    "{% for m in messages %}<s>{{ m['role'] }}\n{{ m['content'] }}<e>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """One token per byte, <s> and <e>."""
    folder = tmp_path_factory.mktemp("tokenizer")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = RawTokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in ("<s>", "<e>")])
    raw.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<e>"}')
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return Tokenizer.load(folder)


def text(tokenizer: Tokenizer, ids: list[int]) -> str:
    return str(tokenizer._tokenizer.decode(ids, skip_special_tokens=False))


@pytest.mark.parametrize("ended", [True, False])
def test_next_prompt_goes_on_from_the_ids_of_the_answer(tokenizer: Tokenizer, ended: bool) -> None:
    talk = Conversation(tokenizer, system="Be brief.")
    first = talk.ask("Hello")
    assert text(tokenizer, first) == "<s>system\nBe brief.<e>\n<s>user\nHello<e>\n<s>assistant\n"
    answer = tokenizer.encode("Hi<e>" if ended else "Hi")
    talk.token_ids = [*first, *answer]
    second = talk.ask("Bye")
    assert second[: len(first) + len(answer)] == [*first, *answer]
    # The end of the turn is there once, whether the model wrote it or was cut off.
    assert text(tokenizer, second[len(first) :]) == "Hi<e>\n<s>user\nBye<e>\n<s>assistant\n"


def test_asking_does_not_change_the_talk_until_there_is_an_answer(tokenizer: Tokenizer) -> None:
    talk = Conversation(tokenizer)
    assert talk.ask("Hello") == talk.ask("Hello")
    assert talk.token_ids == []


def test_a_plain_text_is_a_prompt_of_its_own(tokenizer: Tokenizer) -> None:
    talk = Conversation(tokenizer, system="Solve.", chat=False)
    assert text(tokenizer, talk.ask("3 * 4 =")) == "Solve.\n\n3 * 4 ="
    talk.token_ids = [*talk.ask("3 * 4 ="), *tokenizer.encode("12")]
    assert text(tokenizer, talk.ask("5 + 1 =")) == "Solve.\n\n5 + 1 ="
    assert text(tokenizer, Conversation(tokenizer, chat=False).ask("a")) == "a"


def test_words_come_whole(tokenizer: Tokenizer) -> None:
    decoder = IncrementalDecoder(tokenizer)
    pieces = [decoder.add([token]) for token in tokenizer.encode("a \u00e9\U0001f600!<e>")]
    assert "".join(pieces) == "a \u00e9\U0001f600!"
    assert "\ufffd" not in "".join(pieces)
    assert pieces[2] == "" and pieces[3] == "\u00e9"  # two bytes, one character


def test_a_chat_says_on_what_the_model_was_trained(tmp_path: Path) -> None:
    assert chat.run_notes("", tmp_path) == []
    prompt = "<|im_start|>system\nReply.<|im_end|>\n<|im_start|>user\nWhat is 3 * 4?<|im_end|>\n<|im_start|>assistant\n"
    (tmp_path / "report.json").write_text(json.dumps({"answers_after": [{"prompt": prompt}]}))
    form = "The model was trained on prompts of this form: What is 3 * 4?"
    assert chat.run_notes("Reply.", tmp_path) == ["System message: Reply.", form]
    (tmp_path / "report.json").write_text(json.dumps({"answers_after": []}))
    assert chat.run_notes("Reply.", tmp_path) == ["System message: Reply."]


def settings(folder: str, *words: str) -> tuple[str, str | None, float]:
    """Return model, system message and temperature of a chat."""
    parser = argparse.ArgumentParser()
    chat.add_arguments(parser)
    args = parser.parse_args([folder, *words])
    model = chat.use_run(args, Path(folder))
    return model, args.system, args.temperature


def test_a_run_gives_its_model_system_message_and_temperature(tmp_path: Path) -> None:
    config = configuration.load("recipes/quickstart.toml", ["sampling.temperature=0.7"])
    (tmp_path / "config.toml").write_text(configuration.dump(config))
    with pytest.raises(ConfigError, match=r"neither an exported model nor a checkpoint.*fourfold run --resume"):
        settings(str(tmp_path))
    with pytest.raises(ConfigError, match=r"has no folder `model-step-3` yet.*fourfold run --resume"):
        settings(str(tmp_path / "model-step-3"))
    with (
        locked(tmp_path / RUN_LOCK, "it"),
        pytest.raises(ConfigError, match=r"neither an exported model nor a checkpoint; wait: it is in progress$"),
    ):
        settings(str(tmp_path))
    (tmp_path / "model").mkdir()
    assert settings(str(tmp_path)) == (f"{tmp_path}/model", "Reply with only the final answer.", 0.7)
    assert settings(str(tmp_path), "--system", "", "--temperature", "0") == (f"{tmp_path}/model", "", 0.0)
    (tmp_path / "model-step-20").mkdir()
    system = "Reply with only the final answer."
    assert settings(str(tmp_path / "model-step-20")) == (f"{tmp_path}/model-step-20", system, 0.7)
    parser = argparse.ArgumentParser()
    chat.add_arguments(parser)
    for words, longest in (((), config.sampling.max_new_tokens), (("--max-tokens", "9"), 9)):
        args = parser.parse_args([str(tmp_path), *words])
        chat.use_run(args, tmp_path)
        assert args.max_tokens == longest
    for value in ("-1", "0.001", "2.1", "nan"):
        with pytest.raises(ConfigError, match=rf"--temperature {value}: it must be 0.01 to 2, or 0 for greedy"):
            chat.main(parser.parse_args([str(tmp_path), "--temperature", value]))
    with pytest.raises(ConfigError, match="--max-tokens 0: an answer has at least one token"):
        chat.main(parser.parse_args([str(tmp_path), "--max-tokens", "0"]))
    with pytest.raises(ConfigError, match="--ca and --token are for a service that runs already; add --target"):
        chat.main(parser.parse_args([str(tmp_path), "--token", "x"]))
    (tmp_path / "config.toml").unlink()
    assert settings(str(tmp_path / "model")) == ("", None, 1.0)


def test_a_run_is_talked_to_as_it_was_trained(tmp_path: Path) -> None:
    """Also a run whose name begins as that of an export."""
    run = tmp_path / "model-a"
    (run / "model").mkdir(parents=True)
    parser = argparse.ArgumentParser()
    chat.add_arguments(parser)
    plain = ["data.chat=false", 'data.system_prompt="S"', "batch.tokens_per_micro_batch=8192"]
    for sets, context, expected in (
        ([], 512, (True, 4096, "Reply with only the final answer.")),
        (plain, 8192, (False, 8192, "S")),
    ):
        sets += ["sampling.stop_token_ids=[5, 6]", f"model.max_context_tokens={context}"]
        (run / "config.toml").write_text(configuration.dump(configuration.load("recipes/quickstart.toml", sets)))
        args = parser.parse_args([str(run)])
        assert chat.use_run(args, run) == str(run / "model")
        assert (args.chat, args.max_context, args.system) == expected
        assert args.stop_token_ids == (5, 6)


class _Client:
    """A rollout service with one answer of four tokens and a context of 20."""

    def __init__(self, seen: list[Any], tokenizer: Tokenizer, reason: pb.FinishReason.ValueType) -> None:
        self._seen, self._tokenizer, self._reason = seen, tokenizer, reason

    def __call__(self, target: str, **access: Any) -> _Client:
        self._seen.append(access["token"])
        return self

    def __enter__(self) -> _Client:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def get_info(self, timeout: float) -> pb.GetInfoResponse:
        return pb.GetInfoResponse(max_context_tokens=20, tokenizer_sha256=self._tokenizer.sha256)

    def stream(self, prompt: list[int], params: pb.SamplingParams, timeout: float) -> Iterator[CompletionChunk]:
        self._seen.append((text(self._tokenizer, prompt), params))
        ids, zeros = np.asarray(self._tokenizer.encode("abcd"), np.int32), np.zeros(4, np.float32)
        for part, reason in ((slice(0, 2), pb.FINISH_REASON_UNSPECIFIED), (slice(2, 4), self._reason)):
            yield CompletionChunk(
                sample_index=0, token_ids=ids[part], logprobs=zeros[part], policy_version=0, finish_reason=reason
            )


@pytest.mark.parametrize(
    ("reason", "max_tokens", "output"),
    [
        (pb.FINISH_REASON_STOP, 4, "abcd\n"),
        (pb.FINISH_REASON_LENGTH, 4, "abcd [cut at 4 tokens; --max-tokens raises it]\n"),
        (pb.FINISH_REASON_LENGTH, 99, "abcd [cut at 15 tokens; the context of 20 tokens is full; /new starts a new"),
    ],
)
def test_an_answer_says_if_it_was_cut(
    tokenizer: Tokenizer, reason: pb.FinishReason.ValueType, max_tokens: int, output: str,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    seen: list[Any] = []
    monkeypatch.setattr(chat, "RolloutClient", _Client(seen, tokenizer, reason))
    monkeypatch.setattr("fourfold.model.folder.resolve", Path)
    dates: list[str] = []

    def load(_: Path, *, date: str) -> Tokenizer:
        dates.append(date)
        return tokenizer

    monkeypatch.setattr(Tokenizer, "load", load)
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello\n"))
    monkeypatch.setenv("FOURFOLD_TOKEN", "of the environment")
    sets = [
        "data.date=2026-11-28",
        "data.chat=false",
        "data.system_prompt=''",
        "sampling.stop_token_ids=[5, 6]",
        "sampling.temperature=0.5",
    ]
    (tmp_path / "config.toml").write_text(configuration.dump(configuration.load("recipes/quickstart.toml", sets)))
    (tmp_path / "model").mkdir()
    (tmp_path / "token").write_text("of a file\n")
    parser = argparse.ArgumentParser()
    chat.add_arguments(parser)
    words = [str(tmp_path), "--target", "127.0.0.1:1", "--max-tokens", str(max_tokens)]
    before = signal.getsignal(signal.SIGTERM)
    for access in ([], ["--ca", "ca.pem"], ["--token", f"@{tmp_path / 'token'}"]):
        sys.stdin.seek(0)
        assert chat.main(parser.parse_args([*words, *access])) == 0
        assert capsys.readouterr().out.startswith(output)
    assert set(dates) == {"2026-11-28"}
    signal.signal(signal.SIGTERM, before)
    assert seen[::2] == ["", "of the environment", "of a file"]
    prompt, params = seen[1]
    assert prompt == "Hello"
    assert (list(params.stop_token_ids), params.temperature) == ([5, 6], 0.5)
