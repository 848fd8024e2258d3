"""Tests where a reward model reads its score, and LoRA adapters with a head that is trained itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from fourfold.config import LoraConfig
from fourfold.nn import forward
from fourfold.nn.batching import pack
from fourfold.nn.scores import scored_rows
from fourfold_trainer.zero.lora import LoraAdapters
from tests.support.tiny_models import write_tiny_model

PAD = 3


def test_a_score_is_read_after_the_last_token_that_is_no_padding() -> None:
    rng = np.random.default_rng(0)
    texts = [rng.integers(2, 5, n).astype(np.int32) for n in rng.integers(1, 7, 200)]
    texts[7:9] = [np.full(4, PAD, np.int32), np.array([PAD], np.int32)]
    lengths = np.array([len(ids) for ids in texts])
    starts = np.cumsum(lengths) - lengths
    found = scored_rows(np.concatenate(texts), lengths, PAD) - starts
    # As transformers has it: modeling_layers.py, GenericForSequenceClassification.
    assert found.tolist() == [int((np.arange(len(ids)) * (ids != PAD)).argmax()) for ids in texts]
    assert (scored_rows(np.concatenate(texts), lengths, None) - starts).tolist() == (lengths - 1).tolist()


def test_the_head_is_trained_beside_adapters_and_peft_reads_both(tmp_path: Path) -> None:
    peft: Any = pytest.importorskip("peft")
    base = write_tiny_model(tmp_path / "base", "llama", dtype="float32")
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(base)
    forward.install_values(model)
    adapters = LoraAdapters(LoraConfig(rank=3, alpha=6.0), model, source=base, seed=5)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert "score.weight" in trained and all("lora_" in name for name in trained - {"score.weight"})
    assert len(trained) == len(adapters.parameters) and "score.weight" not in adapters.by_weight
    assert adapters.rename("score.weight") == "score.weight"
    with torch.no_grad():
        for parameter in adapters.parameters:
            parameter.normal_(std=0.1, generator=torch.Generator().manual_seed(1))
    ids = np.arange(9, dtype=np.int32)
    batch = pack([ids], [np.array([8])], [1.0])
    rows = {"rows": torch.tensor([8])}
    found = model(**(forward.value_arguments(batch, torch.device("cpu")) | rows))
    (tmp_path / "adapter").mkdir()
    adapters.write(tmp_path / "adapter")
    plain = transformers.AutoModelForSequenceClassification.from_pretrained(base, num_labels=1)
    read = peft.PeftModel.from_pretrained(plain, tmp_path / "adapter")
    wanted = read(input_ids=torch.from_numpy(ids).long()[None]).logits[0]
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)
    assert float(found.detach().abs()) > 0.01
