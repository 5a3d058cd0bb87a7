"""The maker of the tests' real checkpoint: what it makes opens in transformers and reads English; what it cannot make leaves nothing."""

import hashlib
from pathlib import Path

import pytest
import torch

from tests import checkpoints


def test_existing_folder_is_left_alone(tmp_path: Path):
    (tmp_path / "kept").write_text("mine")
    with pytest.raises(FileExistsError, match="there already"):
        checkpoints.make_smollm2(tmp_path)
    assert (tmp_path / "kept").read_text() == "mine"


def test_wrong_gguf_is_refused_with_nothing_left(tmp_path: Path):
    (tmp_path / "other.gguf").write_bytes(b"GGUF")
    with pytest.raises(ValueError, match=hashlib.sha256(b"GGUF").hexdigest()):
        checkpoints.make_smollm2(tmp_path / "made", gguf=tmp_path / "other.gguf")
    assert [path.name for path in tmp_path.iterdir()] == ["other.gguf"]


@pytest.mark.slow
def test_transformers_opens_the_folder_and_it_reads_english():
    from transformers import AutoTokenizer, LlamaForCausalLM

    folder = checkpoints.smollm2(torch.bfloat16)
    model, report = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not any(report.values()), report
    c = model.config
    assert (c.num_hidden_layers, c.hidden_size, c.num_attention_heads, c.num_key_value_heads, c.head_dim) == (30, 576, 9, 3, 64)
    assert c.tie_word_embeddings and model.lm_head.weight is model.model.embed_tokens.weight
    assert sum(p.numel() for p in model.parameters()) == checkpoints.NUM_PARAMETERS

    # Not the opening, which any model of English knows by heart: 512 tokens from the middle of the shipped text.
    text = (Path(__file__).parents[1] / "examples/data/austen.txt").read_text()[500_000:510_000]
    ids = AutoTokenizer.from_pretrained(folder)(text, return_tensors="pt").input_ids[:, :512]
    with torch.no_grad():
        assert model(ids, labels=ids).loss < 4.0
        assert model(ids.flip(1), labels=ids.flip(1)).loss > 6.0
    assert AutoTokenizer.from_pretrained(folder).decode(ids[0]) in text
