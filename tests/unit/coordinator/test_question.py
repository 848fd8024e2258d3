"""The last message of a user is found in prompts of the usual chat templates."""

from __future__ import annotations

import pytest

from fourfold_coordinator.data.question import last_message

QUESTION = "Where is it?\n\nassistant\nmodel: <b>"


@pytest.mark.parametrize(
    "template",
    [
        "<|im_start|>system\nReply briefly.<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n",
        "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
        "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\nHi!<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n",
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\n{}<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
        "<bos><start_of_turn>user\n{}<end_of_turn>\n<start_of_turn>model\n",
        "<s>[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\n{} [/INST]",
        "<s>[SYSTEM_PROMPT]Be brief.[/SYSTEM_PROMPT][INST]{}[/INST]",
        "<|system|>\nBe brief.<|end|>\n<|user|>\n{}<|end|>\n<|assistant|>\n",
        "<\uff5cbegin\u2581of\u2581sentence\uff5c>Be brief.<\uff5cUser\uff5c>{}<\uff5cAssistant\uff5c><think>\n",
        "<|start|>system<|message|>Be brief.<|end|><|start|>user<|message|>{}<|end|><|start|>assistant",
        "<|START_OF_TURN_TOKEN|><|USER_TOKEN|>{}<|END_OF_TURN_TOKEN|><|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",
        "{}\n",
    ],
)
def test_the_last_message_has_no_marks_of_the_template(template: str) -> None:
    assert last_message(template.format(QUESTION)) == QUESTION


@pytest.mark.parametrize("prompt", ["", "<|im_start|>", "<|im_start|>assistant\n", "<" * 100_000 + "<<SYS>>" * 10_000])
def test_a_prompt_without_a_message_is_returned_as_a_whole(prompt: str) -> None:
    assert last_message(prompt) in (prompt.strip(), "<" * 100_000)
