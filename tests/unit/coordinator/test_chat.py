"""A talk as token ids: nothing the model said is tokenised again, and the template stays whole."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as RawTokenizer

from fourfold import config as configuration
from fourfold.errors import ConfigError
from fourfold.model.tokenizer import Tokenizer
from fourfold_coordinator.cli import chat
from fourfold_coordinator.cli.chat import Conversation, IncrementalDecoder

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
    with pytest.raises(ConfigError, match=r"has no folder `model` yet.*fourfold run --resume"):
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
    with pytest.raises(ConfigError, match="--max-tokens 0: an answer has at least one token"):
        chat.main(parser.parse_args([str(tmp_path), "--max-tokens", "0"]))
    (tmp_path / "config.toml").unlink()
    assert settings(str(tmp_path / "model")) == ("", None, 1.0)
