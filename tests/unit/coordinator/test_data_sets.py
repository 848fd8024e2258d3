"""Files as public data sets have them: each gives exactly the answers that are to be learned, without a key or two."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import pytest

from fourfold.config.sources import DataSourceConfig
from fourfold.model.conversation import EncodingRule
from fourfold.model.tokenizer import Tokenizer
from fourfold_coordinator.data.sources import read_rows
from fourfold_coordinator.rows.encode import EncodingSettings
from fourfold_coordinator.rows.forms import recognise
from fourfold_coordinator.rows.normal import READS, RowFields, default_loss_on
from fourfold_coordinator.rows.store import prepare_store
from tests.support.chat_templates import write_tokenizer
from tests.support.template_shapes import SHAPES

END: Final = "<|im_end|>"
PARAMETERS: Final = '{"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}'
CALL: Final = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Ulm\'s"}}\n</tool_call>'


def said(*texts: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]


# Rows as the data set has them, the keys that it needs, and the texts in the loss, sample by sample.
DATA_SETS: Final[dict[str, tuple[list[dict[str, Any]], dict[str, Any], list[list[str]]]]] = {
    "trl-messages": ([{"messages": said("2+2?", "4")}], {}, [["4"]]),
    "trl-prompt-completion": ([{"prompt": "The sky is", "completion": " blue."}], {}, [[" blue."]]),
    "trl-prompt-completion-chat": ([{"prompt": said("q"), "completion": [said("q", "a")[1]]}], {}, [["a"]]),
    "trl-text": ([{"text": "The sky is blue."}], {}, [["he sky is blue."]]),  # nothing stands before the first token
    "trl-preference": ([{"prompt": "The sky is", "chosen": " blue.", "rejected": " green."}], {},
                       [[" blue."], [" green."]]),
    "trl-preference-implicit": ([{"chosen": said("q", "good"), "rejected": said("q", "bad")}], {}, [["good"], ["bad"]]),
    "trl-unpaired": ([{"prompt": "q", "completion": "a", "label": True}, {"prompt": "q", "completion": "b",
                      "label": False}], {}, [["a"], ["b"]]),
    "trl-stepwise": ([{"prompt": "q", "completions": ["one", "two"], "labels": [True, False]}], {}, [["\n", "\n"]]),
    "openrlhf-sft": ([{"query": "q", "answer": "a", "id": "7"}], {"prompt_field": "query", "answer_field": "answer"},
                     [["a"]]),
    "openrlhf-preference": ([{"prompt": "q", "chosen": said("q", "good"), "rejected": said("q", "bad"), "dataset": "x",
                              "chosen_score": 4.5}], {}, [["good"], ["bad"]]),
    "tulu-3-sft": ([{"id": "a_1", "messages": said("q", "a", "r", "b"), "source": "ai2"}], {}, [["a", "b"]]),
    "tulu-3-preference": ([{"id": "1", "source": "x", "prompt": "q", "chosen": said("q", "good"),
                            "rejected": said("q", "bad")}], {}, [["good"], ["bad"]]),
    "ultrafeedback-binarized": ([{"prompt": "q", "prompt_id": "8", "chosen": said("q", "good"),
                                  "rejected": said("q", "bad"), "messages": said("q", "good"), "score_chosen": 8.0,
                                  "score_rejected": 6.5}], {}, [["good"], ["bad"]]),
    "anthropic-hh": ([{"chosen": "\n\nHuman: hi\n\nAssistant: yes?\n\nHuman: q\n\nAssistant: good",
                       "rejected": "\n\nHuman: hi\n\nAssistant: yes?\n\nHuman: q\n\nAssistant: bad"}], {},
                     [["good"], ["bad"]]),
    "sharegpt": ([{"id": "x_0", "conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}], {},
                 [["a"]]),
    "alpaca-history": ([{"instruction": "q", "input": "", "output": "a", "system": "s", "history": [["p", "b"]]}], {},
                       [["a"]]),
    "dolly": ([{"instruction": "q", "context": "", "response": "a", "category": "open_qa"}], {}, [["a"]]),
    "openorca": ([{"id": "niv.1", "system_prompt": "", "question": "q", "response": "a"}], {}, [["a"]]),
    "openai-functions": ([{"messages": [
        said("Rain?")[0],
        {"role": "assistant", "tool_calls": [{"id": "call_1", "type": "function", "function": {
            "name": "get_weather", "arguments": '{"city": "Ulm\'s"}'}}]},
        {"role": "tool", "tool_call_id": "call_1", "content": "no"}, {"role": "assistant", "content": "No."}],
        "parallel_tool_calls": False, "tools": [{"type": "function", "function": {
            "name": "get_weather", "description": "d", "parameters": json.loads(PARAMETERS)}}]}], {}, [[CALL, "No."]]),
    "glaive-functions": ([{
        "system": "SYSTEM: You are a helpful assistant with access to the following functions. Use them if required -\n"
                  f'{{\n    "name": "get_weather",\n    "description": "d",\n    "parameters": {PARAMETERS}\n}}\n\n'
                  '{"name": "other", "description": "e", "parameters": {}}\n',
        "chat": "USER: Rain?\n\n\nASSISTANT: <functioncall> {\"name\": \"get_weather\", \"arguments\": "
                "'{\"city\": \"Ulm's\"}'} <|endoftext|>\n\n\nFUNCTION RESPONSE: {\"rain\": false}\n\n\n"
                "ASSISTANT: No. <|endoftext|>\n\n\n",
    }, {"system": "SYSTEM: You are a helpful assistant, with no access to external functions.\n",
        "chat": "USER: q\n\n\nASSISTANT: a <|endoftext|>\n\n\n"}], {}, [[CALL, "No."], ["a"]]),
    "tokens": ([{"input_ids": [65, 66, 67], "labels": [-100, 66, 67], "attention_mask": [1, 1, 1]}], {}, [["cd"]]),
}  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("model")
    write_tokenizer(folder, SHAPES["qwen25"], {"eos_token": END})
    return Tokenizer.load(folder)


def spans(store: Any, tokenizer: Tokenizer) -> Iterable[list[str]]:
    """Yield the parts of each sample that are in the loss, without the end of the answer."""
    for number in range(store.meta.samples):
        sample, parts = store.sample(number), list[list[int]]()
        for i, token in enumerate(sample.token_ids.tolist()):
            if sample.loss_mask[i]:
                if not sample.loss_mask[i - 1]:
                    parts.append([])
                parts[-1].append(token)
        texts = [tokenizer.decode(part, skip_special=False) for part in parts]
        ends_with_token = READS[store.meta.form] == "steps" or store.meta.form == "tokens"
        assert ends_with_token or all(text.endswith(END) for text in texts), texts
        yield [text.removesuffix(END) for text in texts]


@pytest.mark.parametrize("name", DATA_SETS)
def test_a_data_set_loads_unchanged(name: str, tmp_path: Path, tokenizer: Tokenizer) -> None:
    rows, keys, expected = DATA_SETS[name]
    path = tmp_path / f"{name}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    source, fields = DataSourceConfig(path=str(path)), RowFields(**keys)
    form = recognise(list(read_rows(source)), fields)
    settings = EncodingSettings(
        form=form, fields=fields, max_tokens=2000, rule=EncodingRule(loss_on=default_loss_on(form))
    )
    store = prepare_store(source, settings, tokenizer, tmp_path / "tokens")
    assert list(spans(store, tokenizer)) == expected
    assert not store.meta.dropped
    if "functions" in name:
        text = tokenizer.decode(store.sample(0).token_ids.tolist(), skip_special=False)
        assert '"name": "get_weather"' in text.partition("<|im_start|>user")[0], (
            "tools, as the chat template shows them"
        )
        assert "access to the following" not in text
