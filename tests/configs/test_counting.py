"""Parameters, FLOPs and memory from the config alone, held to counts by hand."""

import pytest

from ligerformer.configs import ModelConfig
from tests.configs.examples import full, plain


def test_parameters_of_the_plain_model():
    attention = 24 * (4 * 8 + 2 * 16) + 32 * 24
    layer = attention + 3 * 24 * 40 + 2 * 24
    assert ModelConfig.from_dict(plain()).num_params() == 2 * 97 * 24 + 3 * layer + 24


def test_a_tied_weight_is_counted_once():
    config = ModelConfig.from_dict(plain())
    assert config.num_params() - config.replace("tie_embeddings", True).num_params() == 97 * 24


def test_parameters_with_everything_on():
    hidden, heads, kv, dim, mlp, vocab = 24, 4, 2, 16, 40, 97
    attention = hidden * (heads + 2 * kv) * dim + heads * dim * hidden  # products
    attention += (heads + 2 * kv) * dim + hidden + 2 * dim + heads  # biases, q_norm and k_norm, sinks
    gated = 3 * hidden * mlp + 2 * mlp + hidden
    streams = 4
    site = (streams * hidden + 1) * (streams**2 + 2 * streams) + 3
    local = attention + gated + 2 * hidden + 2 * hidden + 2 * site  # norms and post norms
    parallel = 2 * attention + gated + hidden + site
    config = ModelConfig.from_dict(full())
    assert config.num_params() == vocab * hidden + vocab + 4 * local + parallel + hidden
    with_post_norms = config.replace("layers.global.post_norm", {"type": "rms_norm", "eps": 1e-5})
    assert with_post_norms.num_params() - config.num_params() == 3 * hidden  # one a branch


@pytest.mark.parametrize("seq_len", [1, 64, 4096])
def test_flops_of_the_plain_model(seq_len):
    weights = 24 * (4 * 8 + 2 * 16) + 32 * 24 + 3 * 24 * 40
    pairs = seq_len / 2  # mean number of keys a query sees, the causal half
    forward = 3 * (2 * weights + 2 * 2 * 32 * pairs) + 2 * 24 * 97
    assert ModelConfig.from_dict(plain()).flops_per_token(seq_len) == pytest.approx(3 * forward, rel=1e-12)


def test_a_window_saves_flops_where_it_is_shorter_than_the_sequence():
    config = ModelConfig.from_dict(plain())
    windowed = config.replace("layers.main.attention.window", 16)
    assert windowed.flops_per_token(16) == config.flops_per_token(16)
    assert windowed.flops_per_token(8) == config.flops_per_token(8)
    # Queries from the 16th on see 16 keys instead of about their own position: what is hidden is a triangle of side 64 - 16.
    hidden = (64 - 16) ** 2 / 2 / 64
    assert config.flops_per_token(64) - windowed.flops_per_token(64) == pytest.approx(3 * 3 * 4 * 32 * hidden, rel=1e-12)


def test_memory_of_weights_and_states():
    config = ModelConfig.from_dict(plain())
    params = config.num_params()
    memory = config.training_memory(2, 64)
    assert (memory.weights, memory.gradients, memory.optimizer) == (2 * params, 2 * params, 4 * params)
    wide = config.training_memory(2, 64, dtype_bytes=4, state_bytes=4)
    assert (wide.weights, wide.gradients, wide.optimizer) == (4 * params, 4 * params, 8 * params)
    assert memory.peak == max(memory.weights + memory.optimizer + memory.activations + memory.head, 8 * params)
    assert f"peak {memory.peak / 2**30:.2f} GiB" in str(memory)


def test_activations_grow_with_tokens_and_shrink_with_recompute():
    config = ModelConfig.from_dict(plain())
    one, two = config.training_memory(1, 64), config.training_memory(2, 64)
    assert two.activations == 2 * one.activations
    recomputed = config.training_memory(1, 64, recompute="layer")
    # Kept: the stream and the branch output yet to be added before each layer, one layer's own, the last stream with its normed form, ids and labels.
    layers = one.activations - 64 * (2 * 2 * 24 + 8)
    assert recomputed.activations == pytest.approx(layers / 3 + 64 * (3 * 2 * 2 * 24 + 2 * 2 * 24 + 8))


def test_cheap_recompute_keeps_one_normed_input_and_one_gated_product():
    config = ModelConfig.from_dict(plain())
    stored, cheap = (config.training_memory(1, 64, recompute=r).activations for r in ("none", "cheap"))
    assert stored - cheap == 64 * 2 * (3 * (2 * 24 + 40) - (24 + 40))  # three layers' two normed inputs and a product, less one of each
    without = config.replace("layers.main.norm", None)
    stored, cheap = (without.training_memory(1, 64, recompute=r).activations for r in ("none", "cheap"))
    assert stored - cheap == 64 * 2 * (3 * 40 - 40)
    streams = config.replace("residual", {"type": "mhc", "streams": 2})
    stored, cheap = (streams.training_memory(1, 64, recompute=r).activations for r in ("none", "cheap"))
    assert stored - cheap == 64 * 2 * (3 * (2 * 24 + 40) - (24 + 40))


def test_the_head_keeps_at_most_its_chunk_of_logits():
    config = ModelConfig.from_dict(plain())
    small = config.training_memory(64, 64, chunk_bytes=1000)
    assert config.training_memory(64, 64).head - small.head == 64 * 64 * 97 * 2 - 1000
