"""The model's call: every argument, what it refuses, how it is built, moved, copied, compiled and recomputed."""

from __future__ import annotations

import copy
import dataclasses
import math
import pickle

import pytest
import torch
from torch import Tensor, nn

from ligerformer import ModelConfig, build, kernels
from ligerformer.blocks import Cache, Decoder, Head, allocate, constant, initialize
from ligerformer.blocks.state import documents_of, positions_of, shifted_labels
from ligerformer.configs import BlockConfig, ConfigError, register, registry
from ligerformer.configs.model import NO_BRANCH_NAMES
from tests.blocks.contract import distance, gradients, made, precision, tokens
from tests.configs.examples import LLAMA3, full, plain


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.double().flatten(0, 1), labels.flatten())


# ---- labels ----


def test_labels_are_shifted_inside(device):
    model, ids = made(plain(), device), tokens(device=device)
    labels = ids.clone()
    labels[0, 2:5] = -100
    expected = cross_entropy(model(ids).logits[:, :-1], labels[:, 1:])
    assert model(ids, labels).loss.item() == pytest.approx(expected.item(), rel=1e-5)


def test_shift_labels_are_taken_as_they_are(device):
    model, ids = made(plain(), device), tokens(device=device)
    labels = tokens(device=device, seed=5)
    labels[1, 3:] = -100
    loss = model(ids, shift_labels=labels).loss
    assert loss.item() == pytest.approx(cross_entropy(model(ids).logits, labels).item(), rel=1e-5)
    assert torch.equal(model(ids, ids, shift_labels=labels).loss, loss)
    packed = torch.tensor([[0] * 5 + [1] * 6] * 2, device=device)  # not cut at documents either: they say what they mean
    expected = cross_entropy(model(ids, document_ids=packed).logits, labels)
    assert model(ids, shift_labels=labels, document_ids=packed).loss.item() == pytest.approx(expected.item(), rel=1e-5)


def test_the_last_token_of_a_document_predicts_nothing(device):
    model, ids = made(plain(), device), tokens(1, device=device)
    packed = torch.tensor([[0] * 5 + [1] * 6], device=device)
    logits = model(ids, document_ids=packed).logits
    kept = [t for t in range(10) if t != 4]
    expected = cross_entropy(logits[:, kept], ids[:, [t + 1 for t in kept]])
    assert model(ids, ids, document_ids=packed).loss.item() == pytest.approx(expected.item(), rel=1e-5)


def test_num_items_divides_the_sum(device):
    """One batch of eight equals four of two, with unequal numbers of labels, for a number and for a device tensor."""
    dtype, rounding = precision(device)
    model, ids = made(plain(), device, dtype), tokens(8, device=device)
    labels = ids.clone()
    for row in range(8):
        labels[row, : row + 2] = -100
    count = (labels[:, 1:] != -100).sum()
    whole = model(ids, labels).loss
    expected = gradients(model, whole)
    for num_items in (int(count), count):
        losses = [model(ids[i : i + 2], labels[i : i + 2], num_items_in_batch=num_items).loss for i in range(0, 8, 2)]
        summed = torch.stack(losses).sum()
        assert summed.item() == pytest.approx(whole.item(), rel=1e-6)
        for name, gradient in gradients(model, summed).items():
            assert distance(gradient, expected[name]) < rounding, name


def test_a_batch_without_labels_has_loss_zero_and_zero_gradients(device):
    model, ids = made(plain(), device), tokens(device=device)
    loss = model(ids, torch.full_like(ids, -100)).loss
    assert loss.item() == 0.0
    assert all(not gradient.any() for gradient in gradients(model, loss).values())


def test_an_auxiliary_loss_is_summed_over_branches_and_added(device):
    @register("mlp", "penalised")
    class Penalised(nn.Linear):
        @dataclasses.dataclass(frozen=True)
        class Config(BlockConfig):
            weight: float

        def __init__(self, config, model_config, layer_index):
            super().__init__(model_config.hidden_size, model_config.hidden_size, bias=False)
            self.penalty = config.weight

        def forward(self, x, ctx, shared):
            return super().forward(x), {"aux_loss": self.penalty * x.float().square().mean()}

    try:
        config = ModelConfig.from_dict(plain()).replace("layers.main.mlp", {"type": "penalised", "weight": 0.0})
        ids = tokens(device=device)
        without = made(config, device)(ids, ids).loss
        losses = [made(config.replace("layers.main.mlp.weight", w), device)(ids, ids).loss - without for w in (1.0, 2.0)]
        assert losses[0] > 0.1
        assert losses[1].item() == pytest.approx(2 * losses[0].item(), rel=1e-5)
        model = made(config.replace("layers.main.mlp.weight", 1.0), device)
        expected = gradients(model, model(ids, ids).loss)
        model.recompute = "layer"
        assert all(torch.equal(g, expected[name]) for name, g in gradients(model, model(ids, ids).loss).items())
    finally:
        registry.unregister("mlp", "penalised")


# ---- what is returned ----


def test_logits_to_keep(device):
    model, ids = made(plain(), device), tokens(device=device)
    logits = model(ids).logits
    for keep, rows in ((0, slice(None)), (1, slice(-1, None)), (3, slice(-3, None)), (99, slice(None))):
        kept = model(ids, logits_to_keep=keep).logits
        assert kept.shape == logits[:, rows].shape and distance(kept, logits[:, rows]) < 1e-5
    indices = torch.tensor([7, 0, 7], device=device)
    assert distance(model(ids, logits_to_keep=indices).logits, logits[:, indices]) < 1e-5
    with pytest.raises(ValueError, match="logits_to_keep: is -1"):
        model(ids, logits_to_keep=-1)


def test_logits_are_made_only_where_wanted(device):
    model, ids = made(plain(), device), tokens(device=device)
    assert list(model(ids, ids)) == ["loss"]
    assert list(model(ids, shift_labels=ids)) == ["loss"]
    assert list(model(ids, ids, return_logits=True)) == ["loss", "logits"]
    assert list(model(ids)) == ["logits"]
    assert list(model(ids, return_logits=False, return_hidden_states=True)) == ["hidden_states"]
    assert torch.equal(model(ids, ids, return_logits=True).logits, model(ids).logits)


def test_the_loss_never_asks_the_head_for_logits(device, monkeypatch):
    model, ids = made(plain(), device), tokens(device=device)
    monkeypatch.setattr(Head, "logits", lambda *_: pytest.fail("logits were made"))
    model(ids, ids).loss.backward()
    with torch.no_grad():
        model(ids, ids)


def test_hidden_states_are_the_stream_before_each_layer_and_the_normed_output(device):
    data = plain()
    model, ids = made(data, device), tokens(device=device)
    output = model(ids, return_hidden_states=True)
    hidden = output.hidden_states
    assert len(hidden) == 4
    assert torch.equal(hidden[0], model.embed(ids))
    assert torch.equal(model.head.logits(hidden[-1]), output.logits)
    assert torch.equal(output.logits, model(ids).logits)  # looking changes nothing
    for i in range(3):
        shorter = Decoder(ModelConfig.from_dict(data | {"num_layers": i + 1}))
        allocate(shorter, device, torch.float32)
        shorter.load_state_dict({k: v for k, v in model.state_dict().items() if k in shorter.state_dict()})
        assert torch.equal(
            shorter.final_norm(hidden[i + 1]) if i < 2 else hidden[-1], shorter(ids, return_hidden_states=True).hidden_states[-1]
        )


def test_hidden_states_of_streams_have_an_axis_for_them(device):
    model = made(plain() | {"residual": {"type": "mhc", "streams": 3}}, device)
    hidden = model(tokens(device=device), return_hidden_states=True).hidden_states
    assert [h.shape for h in hidden] == [(2, 11, 3, 24)] * 3 + [(2, 11, 24)]


def test_the_output_is_a_mapping_and_a_sequence(device):
    ids = tokens(device=device)
    output = made(plain(), device)(ids, ids, return_logits=True)
    assert output.loss is output["loss"] is output[0]
    assert output.logits is output["logits"] is output[-1]
    assert output[1:] == (output.logits,) and output[:2] == (output.loss, output.logits)
    assert dict(output).keys() == {"loss", "logits"} and "hidden_states" not in output
    assert output.hidden_states is None and isinstance(output, dict)
    assert list(copy.copy(output)) == ["loss", "logits"]
    with pytest.raises(AttributeError, match="losses"):
        _ = output.losses
    with pytest.raises(KeyError):
        _ = output["hidden_states"]


# ---- documents, positions, padding ----


def test_positions_that_restart_mean_packed_documents(device):
    model, ids = made(plain(), device), tokens(device=device)
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 0, 1, 2, 3]], device=device)
    documents = torch.tensor([[0] * 4 + [1] * 3 + [2] * 4] * 2, device=device)
    expected = model(ids, ids, document_ids=documents, return_logits=True)
    for given in (positions, positions.expand(2, -1)):
        output = model(ids, ids, position_ids=given, return_logits=True)
        assert torch.equal(output.logits, expected.logits) and torch.equal(output.loss, expected.loss)
    whole = model(ids, position_ids=torch.arange(11, device=device)[None])
    assert distance(whole.logits, model(ids).logits) < 1e-5


def test_positions_are_used_as_given_beside_a_mask_or_documents(device):
    """With ids or a mask the positions only rotate: a jump in them is no document, and a shift of all of them changes nothing."""
    dtype, rounding = precision(device)
    model, ids = made(plain(), device, dtype), tokens(device=device)
    mask = torch.ones_like(ids)
    positions = torch.arange(11, device=device)[None]
    expected = model(ids).logits
    assert distance(model(ids, attention_mask=mask, position_ids=positions + 7).logits, expected) < max(rounding, 1e-5)
    jumping = torch.where(positions < 5, positions, positions + 20)
    logits = model(ids, attention_mask=mask, position_ids=jumping).logits
    assert distance(logits[:, :5], expected[:, :5]) < rounding
    assert distance(logits[:, 5:], expected[:, 5:]) > 1e-2


def test_padding_left_and_right(device):
    dtype, rounding = precision(device)
    model, ids = made(plain(), device, dtype), tokens(device=device)
    mask = torch.ones_like(ids)
    mask[0, :4], mask[1, 8:] = 0, 0
    output = model(ids, torch.where(mask.bool(), ids, -100), attention_mask=mask, return_logits=True)
    rows = [ids[:1, 4:], ids[1:, :8]]
    alone = [model(row).logits for row in rows]
    assert distance(output.logits[:1, 4:], alone[0]) < rounding and distance(output.logits[1:, :8], alone[1]) < rounding
    expected = sum(cross_entropy(a[:, :-1], row[:, 1:]) * (row.shape[1] - 1) for a, row in zip(alone, rows, strict=True)) / (6 + 7)
    assert output.loss.item() == pytest.approx(expected.item(), rel=1e-6)
    assert torch.equal(model(ids, attention_mask=mask.bool()).logits, output.logits)


def test_padding_within_packed_documents(device):
    dtype, rounding = precision(device)
    model, ids = made(plain(), device, dtype), tokens(1, device=device)
    mask = torch.tensor([[1] * 9 + [0] * 2], device=device)
    packed = torch.tensor([[0] * 4 + [1] * 7], device=device)
    logits = model(ids, attention_mask=mask, document_ids=packed).logits
    assert distance(logits[:, 4:9], model(ids[:, 4:9]).logits) < rounding


def test_document_ids_need_no_order(device):
    model, ids = made(plain(), device), tokens(device=device)
    first, second = torch.tensor([[0] * 5 + [1] * 6] * 2, device=device), torch.tensor([[7] * 5 + [-3] * 6] * 2, device=device)
    assert torch.equal(model(ids, document_ids=first).logits, model(ids, document_ids=second).logits)


def test_helpers_of_documents():
    positions = torch.tensor([[0, 1, 0, 1, 2]])
    assert documents_of((2, 5), None, None, positions).tolist() == [[0, 0, 1, 1, 1]] * 2
    assert documents_of((1, 5), None, None, torch.tensor([[0, 1, 5, 6, 6]])).tolist() == [[0, 0, 1, 1, 2]]  # a jump starts one too
    assert documents_of((1, 5), None, None, None) is None
    assert documents_of((1, 5), None, torch.tensor([[0, 1, 1, 1, 0]]), positions).tolist() == [[-1, 0, 0, 0, -1]]
    assert positions_of(torch.tensor([[-1, -1, 0, 0, 5], [2, 2, 2, 2, 2]])).tolist() == [[0, 0, 0, 1, 0], [0, 1, 2, 3, 4]]
    assert positions_of(torch.tensor([[-1, 0, 0, -1, 0, 7, -1, 7]])).tolist() == [[0, 0, 1, 0, 2, 0, 0, 1]]  # padding is passed over
    labels = torch.tensor([[1, 2, 3, 4, 5]])
    assert shifted_labels(labels, None).tolist() == [[2, 3, 4, 5, -100]]
    assert shifted_labels(labels, torch.tensor([[0, 0, 1, 1, 1]])).tolist() == [[2, -100, 4, 5, -100]]


# ---- a cache in the call ----


def test_chunks_with_a_cache_equal_one_call(device):
    """In chunks, with documents that start in the middle of one and go on in the next; positions restart with them."""
    dtype, rounding = precision(device)
    data = plain()
    data["layers"]["main"]["attention"]["window"] = 4
    model, ids = made(data, device, dtype), tokens(device=device)
    documents = torch.tensor([[0] * 2 + [1] * 5 + [2] * 4, [0] * 8 + [1] * 3], device=device)
    whole = model(ids, document_ids=documents).logits
    cache, parts = model.new_cache(2, 11), []
    with torch.no_grad():
        for a, b in ((0, 3), (3, 5), (5, 9)):
            parts.append(model(ids[:, a:b], document_ids=documents[:, a:b], cache=cache).logits)
        parts.append(model(ids[:, 9:], cache=cache).logits)  # without ids: each row goes on with its last document
    assert distance(torch.cat(parts, dim=1), whole) < rounding


def test_a_mask_for_the_whole_of_a_cached_sequence_is_understood(device):
    dtype, rounding = precision(device)
    model, ids = made(plain(), device, dtype), tokens(device=device)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    cache = model.new_cache(2, 11)
    with torch.no_grad():
        model(ids[:, :6], attention_mask=mask[:, :6], cache=cache)
        logits = model(ids[:, 6:], attention_mask=mask, cache=cache).logits
    assert distance(logits, model(ids, attention_mask=mask).logits[:, 6:]) < rounding


def test_a_cache_is_never_filled_twice_by_recomputation(device):
    model, ids = made(plain(), device, recompute="layer"), tokens(device=device)
    cache = model.new_cache(2, 11)
    model(ids, cache=cache).logits.sum().backward()
    assert {entry.end for entry in cache.entries.values()} == {11}


@pytest.mark.parametrize(
    ("batch", "new", "message"),
    [(3, 4, "cache: was made for 2 rows; input_ids has 3"), (2, 12, "holds 11 tokens, 0 are in use and 12 came")],
)
def test_a_cache_that_does_not_fit_is_refused(batch, new, message, device):
    model = made(plain(), device)
    cache = model.new_cache(2, 11)
    with pytest.raises(ValueError, match=message):
        model(tokens(batch, new, device=device), cache=cache)
    assert isinstance(cache, Cache) and cache.length == 0


# ---- what is refused ----


def test_inputs_that_do_not_fit_are_refused(device):
    model, ids = made(plain(), device), tokens(device=device)
    short = ids[:, :-1]
    for args, options, message in (
        ((ids[:0],), {}, r"input_ids: shape is \(0, 11\); expected \(batch, tokens\), both at least 1"),
        ((ids[:, :0],), {}, r"input_ids: shape is \(2, 0\)"),
        ((ids[0],), {}, r"input_ids: shape is \(11,\)"),
        ((ids, short), {}, r"labels: shape \(2, 10\)"),
        ((ids,), {"shift_labels": short}, r"shift_labels: shape \(2, 10\)"),
        ((ids,), {"document_ids": ids[:1]}, r"document_ids: shape \(1, 11\)"),
        ((ids,), {"attention_mask": short}, r"attention_mask: shape \(2, 10\) on .*; expected \(2, 11\)"),
        ((ids,), {"attention_mask": ids[:, None, None]}, r"attention_mask: shape \(2, 1, 1, 11\)"),
        ((ids,), {"position_ids": ids[0]}, r"position_ids: shape \(11,\) on .*; expected \(2, 11\) or \(1, 11\)"),
        ((ids.to("meta"),), {}, f"input_ids is on meta and the model on {device}"),
        ((ids, ids.to("meta")), {}, "labels: shape .* on meta"),
        ((ids,), {"attention_mask": ids.to("meta")}, "attention_mask: shape .* on meta"),
        ((ids,), {"position_ids": ids.to("meta")}, "position_ids: shape .* on meta"),
    ):
        with pytest.raises(ValueError, match=message):
            model(*args, **options)
    with pytest.raises(TypeError, match="ids has dtype float32; expected int64 or int32"):
        model(ids.float())


def test_a_model_on_the_meta_device_says_so():
    with pytest.raises(ValueError, match="input_ids is on cpu and the model on meta"):
        build(plain(), device="meta")(tokens())


def test_ids_labels_and_positions_out_of_range_are_errors_on_the_cpu():
    model, ids = made(plain()), tokens()
    for wrong in (97, -1):
        changed = ids.clone()
        changed[1, 3] = wrong
        with pytest.raises(IndexError, match=f"{wrong}"):
            model(changed)
        with pytest.raises(IndexError, match=f"{wrong}"):
            model(ids, changed)
    positions = torch.arange(11)[None].clone()
    positions[0, 4] = -2
    with pytest.raises(ValueError, match="position_ids: the least is -2; expected 0 and up"):
        model(ids, position_ids=positions, attention_mask=torch.ones_like(ids))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_ids_and_positions_out_of_range_are_nan_rows_on_a_gpu():
    model, ids = made(plain(), "cuda"), tokens(device="cuda")
    changed = ids.clone()
    changed[1, 3] = 97
    logits = model(changed).logits
    # 0 * NaN is NaN: what is hidden from a query may still spoil it within its row, never another row
    assert bool(logits[1, 3:].isnan().all()) and bool(logits[0].isfinite().all())
    positions = torch.arange(11, device="cuda")[None].clone()
    positions[0, 4] = -2
    logits = model(ids, position_ids=positions, attention_mask=torch.ones_like(ids)).logits
    assert bool(logits[:, 4].isnan().all())


# ---- building ----


def test_adding_a_block_moves_no_other_start():
    config = ModelConfig.from_dict(plain())
    base = dict(build(config, seed=4).named_parameters())
    wider = {
        "residual": config.replace("residual", {"type": "mhc", "streams": 2}),
        "post_norm": config.replace("layers.main.post_norm", {"type": "rms_norm", "eps": 1e-5}),
        "layers": config.replace("num_layers", 5),
        "norm": config.replace("layers.main.attention.qk_norm", {"type": "rms_norm", "eps": 1e-5}),
    }
    for changed in wider.values():
        others = dict(build(changed, seed=4).named_parameters())
        assert base.keys() < others.keys()
        assert all(torch.equal(x, others[name]) for name, x in base.items())


def test_the_seed_is_all_that_chooses():
    first, second = build(plain(), seed=4), build(plain(), seed=4)
    torch.manual_seed(0)
    third, fourth = build(plain()), build(plain())
    torch.manual_seed(0)
    fifth = build(plain())
    ids = tokens()
    assert torch.equal(first(ids).logits, second(ids).logits)
    assert not torch.equal(first(ids).logits, build(plain(), seed=5)(ids).logits)
    assert not torch.equal(third(ids).logits, fourth(ids).logits)
    assert torch.equal(third(ids).logits, fifth(ids).logits)
    assert not torch.equal(first.layers[0].mlp.down_proj.weight, first.layers[1].mlp.down_proj.weight)


def test_every_parameter_starts_as_the_table_of_init_says(device):
    data = full()
    data |= {"hidden_size": 64, "vocab_size": 300, "tie_embeddings": False}
    model = build(data, device=device, seed=0)
    for name, x in model.named_parameters():
        if ".sites." in name:
            assert bool((x == (0.01 if name.endswith("alpha") else 0.0)).all()), name
        elif name.endswith((".bias", "sinks")) or "norm" in name:  # the norms' offset is 1, so that 0 makes them plain
            assert not x.any(), name
        else:
            assert x.dim() == 2 and x.std().item() == pytest.approx(0.02, rel=0.1) and abs(x.mean().item()) < 0.1 * 0.02, name
    plain_norms = [x for name, x in build(plain(), device=device).named_parameters() if "norm" in name]
    assert plain_norms and all(bool((x == 1).all()) for x in plain_norms)


def test_bf16_starts_as_fp32_rounded(device):
    wide, half = build(plain(), device=device, seed=2), build(plain(), device=device, seed=2, dtype=torch.bfloat16)
    for (name, x), y in zip(wide.named_parameters(), half.parameters(), strict=True):
        assert y.dtype == torch.bfloat16 and torch.equal(x.to(torch.bfloat16), y), name


def test_a_tied_head_holds_no_parameter(device):
    tied, untied = made(plain() | {"tie_embeddings": True}, device), made(plain(), device)
    assert "head.weight" not in tied.state_dict() and "head.weight" in untied.state_dict()
    assert tied.head.weight is tied.embed.weight
    for moved in (tied.to(torch.bfloat16), copy.deepcopy(tied), pickle.loads(pickle.dumps(tied)), tied.to_empty(device=device)):
        assert moved.head.weight is moved.embed.weight
    clone = copy.deepcopy(tied)
    assert clone.embed.weight is not tied.embed.weight
    ids = tokens(device=device)
    model = made(plain() | {"tie_embeddings": True}, device)
    model(ids, ids).loss.backward()
    direct = nn.functional.embedding(ids, model.embed.weight)
    assert torch.equal(direct, model.embed(ids)) and model.embed.weight.grad.abs().sum() > 0


class Losing(nn.Linear):
    """An mlp that keeps a buffer in the ordinary way."""

    @dataclasses.dataclass(frozen=True)
    class Config(BlockConfig):
        persistent: bool
        declared: bool = True

    def __init__(self, config, model_config, layer_index):
        super().__init__(model_config.hidden_size, model_config.hidden_size, bias=False)
        self.config = config
        self.register_buffer("table", torch.arange(3.0), persistent=config.persistent)

    def initial_values(self):
        return {"weight": constant(0.5)} | ({"table": constant(2.0)} if self.config.declared else {})

    def forward(self, x, ctx, shared):
        return super().forward(x)


@pytest.fixture
def losing():
    register("mlp", "losing")(Losing)
    yield lambda **options: ModelConfig.from_dict(plain()).replace("layers.main.mlp", {"type": "losing", **options})
    registry.unregister("mlp", "losing")


def test_a_buffer_that_would_lose_its_values_is_refused(losing, device):
    with pytest.raises(ValueError, match=r"buffer 'table' of layers\.0\.mlp \(Losing\) would lose its values"):
        build(losing(persistent=False), device=device)


def test_a_persistent_buffer_is_initialised_as_parameters_are(losing, device):
    model = build(losing(persistent=True), device=device)
    assert model.layers[2].mlp.table.tolist() == [2.0] * 3
    assert "layers.2.mlp.table" in model.state_dict()
    with pytest.raises(ValueError, match=r"layers\.0\.mlp\.table of Losing has no initial value"):
        build(losing(persistent=True, declared=False), device=device)


@pytest.mark.parametrize("key", ["sites", "norms", "post_norms", "forward", "train", "sublayers", "a.b", ""])
def test_a_branch_that_cannot_have_its_name_is_refused(key):
    data = plain()
    layer = data["layers"]["main"]
    layer |= {"branches" if key == "" else key: {"slot": "mlp"} | layer.pop("mlp"), "sublayers": [["attention"], [key]]}
    with pytest.raises(ConfigError):
        ModelConfig.from_dict(data)


def test_no_branch_takes_a_name_of_the_layer():
    layer = build(plain(), device="meta").layers[0]
    own = {*dir(layer)} - {"attention", "mlp"} - {name for name in dir(layer) if name.startswith("__")} - {"_branches"}
    assert own <= NO_BRANCH_NAMES


def test_two_branches_that_share_one_name_are_refused():
    @register("mlp", "sharing")
    class Sharing(nn.Module):
        @dataclasses.dataclass(frozen=True)
        class Config(BlockConfig):
            pass

        def __init__(self, config, model_config, layer_index):
            super().__init__()

        def forward(self, x, ctx, shared):
            return x, {"state": x}

    try:
        data, branch = plain(), {"slot": "mlp", "type": "sharing"}
        data["layers"]["main"] |= {"mlp": branch, "second": branch}
        data["layers"]["main"]["sublayers"] = [["attention"], ["mlp"], ["second"]]
        made(data)(tokens())  # one after the other: the later one's stands
        data["layers"]["main"]["sublayers"] = [["attention"], ["mlp", "second"]]
        with pytest.raises(ValueError, match="branches 'mlp' and 'second' of one sublayer both share 'state'"):
            made(data)(tokens())
    finally:
        registry.unregister("mlp", "sharing")


def test_recompute_takes_its_values_alone(device):
    model = build(plain(), device=device)
    assert model.recompute == "none"
    model.gradient_checkpointing_enable()
    assert model.recompute == "layer"
    model.gradient_checkpointing_disable()
    assert model.recompute == "none"
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    assert model.recompute == "layer" and build(plain(), device="meta", recompute="layer").recompute == "layer"
    with pytest.raises(ValueError, match="recompute is 'most'; expected 'none' or 'cheap' or 'layer'"):
        build(plain(), device="meta", recompute="most")


def test_recomputed_layers_draw_the_same_random_numbers(device):
    @register("mlp", "dropped")
    class Dropped(nn.Linear):
        @dataclasses.dataclass(frozen=True)
        class Config(BlockConfig):
            pass

        def __init__(self, config, model_config, layer_index):
            super().__init__(model_config.hidden_size, model_config.hidden_size, bias=False)

        def forward(self, x, ctx, shared):
            return nn.functional.dropout(super().forward(x), 0.5)

    try:
        data = plain()
        data["layers"]["main"]["mlp"] = {"type": "dropped"}
        model, ids = made(data, device), tokens(device=device)
        torch.manual_seed(1)
        expected = gradients(model, model(ids, ids).loss)
        model.recompute = "layer"
        torch.manual_seed(1)
        assert all(torch.equal(g, expected[name]) for name, g in gradients(model, model(ids, ids).loss).items())
    finally:
        registry.unregister("mlp", "dropped")


def test_recompute_saves_activations(device):
    model, ids = made(plain(), device), tokens(4, 32, device=device)
    saved = {}
    for recompute in ("none", "layer"):
        model.recompute = recompute
        kept: dict[int, int] = {}

        def pack(x, kept=kept):
            kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            model(ids, ids)
        saved[recompute] = sum(kept.values())
    assert saved["layer"] < 0.5 * saved["none"]


# ---- moving, copying, compiling ----


def rope_model(device: str) -> Decoder:
    data = plain()
    data["layers"]["main"]["attention"]["rope"]["scaling"] = LLAMA3 | {"original_max_position_embeddings": 8}
    return made(data | {"residual": {"type": "mhc", "streams": 2}}, device)


def test_constants_survive_every_way_of_moving_and_copying(device):
    model, ids = rope_model(device), tokens(device=device)
    fresh = {name: x.clone() for name, x in model.named_buffers(remove_duplicate=False)}
    assert len(fresh) == 3 * 2 + 3 * 2  # two frequency tables a layer, one start a site
    logits = model(ids).logits
    weights = model.state_dict()
    moved = {
        "deepcopy": copy.deepcopy(model),
        "pickle": pickle.loads(pickle.dumps(model)),
        "to_empty": copy.deepcopy(model).to_empty(device=device),
        "meta and back": copy.deepcopy(model).to("meta").to_empty(device=device),
        "bf16 and back": copy.deepcopy(model).to(torch.bfloat16).float(),
        "half": copy.deepcopy(model).half(),
        "double": copy.deepcopy(model).double(),
    }
    for how, other in moved.items():
        for name, x in other.named_buffers(remove_duplicate=False):
            assert x.dtype == fresh[name].dtype and torch.equal(x, fresh[name]), (how, name)
        other.float().load_state_dict(weights)
        assert torch.equal(other(ids).logits, logits), how
    assert not any(name in weights for name in fresh)


def test_a_state_dict_that_does_not_fit_is_refused():
    model = build(plain())
    weights = model.state_dict()
    del weights["final_norm.weight"]
    with pytest.raises(RuntimeError, match=r"final_norm\.weight"):
        model.load_state_dict(weights)


def compiled_equals_eager(model: Decoder, ids: Tensor, **given: Tensor | bool) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    loss, expected = compiled(ids, ids, **given).loss, model(ids, ids, **given).loss
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    ours, theirs = gradients(model, loss), gradients(model, expected)
    largest = max(g.abs().max() for g in theirs.values())
    assert all((g - theirs[name]).abs().max() < 1e-5 * largest for name, g in ours.items())


def test_forward_and_loss_compile_whole(device):
    compiled_equals_eager(made(plain() | {"num_layers": 1}, device), tokens(device=device))


@pytest.mark.slow
@pytest.mark.parametrize("given", ["nothing", "documents", "positions", "mask", "logits"])
@pytest.mark.parametrize("data", [plain() | {"num_layers": 2}, full() | {"num_layers": 3}], ids=["plain", "full"])
def test_every_form_of_the_call_compiles_whole(data, given, device):
    documents = torch.tensor([[0] * 4 + [1] * 7, [0] * 10 + [1]], device=device)
    arguments = {
        "nothing": {},
        "documents": {"document_ids": documents},
        "positions": {"position_ids": positions_of(documents)},
        "mask": {"attention_mask": documents},
        "logits": {"return_logits": True, "return_hidden_states": True},
    }
    compiled_equals_eager(made(data, device), tokens(device=device), **arguments[given])


def test_generation_and_training_run_under_the_reference_alone(device):
    model, ids = made(plain(), device), tokens(device=device)
    with kernels.use("reference"):
        loss = model(ids, ids).loss
        loss.backward()
    assert math.isfinite(loss.item())


def test_names_of_parameters_are_the_documented_ones():
    names = set(build(full(), device="meta").state_dict())
    for expected in (
        "embed.weight",
        "head.bias",
        "final_norm.weight",
        "layers.0.attention.qkv_proj.q_proj.weight",
        "layers.0.attention.q_norm.weight",
        "layers.0.attention.sinks",
        "layers.0.mlp.down_proj.bias",
        "layers.0.norms.1.weight",
        "layers.0.post_norms.mlp.weight",
        "layers.2.second.o_proj.weight",
        "layers.2.sites.0.phi",
    ):
        assert expected in names
    assert "layers.0.attention.qkv_proj.weight" in build(plain(), device="meta").state_dict()


def test_initialize_can_be_told_which_parameters():
    model = build(plain(), seed=0)
    before = {name: x.clone() for name, x in model.named_parameters()}
    initialize(model, 1, names={"layers.1.mlp.down_proj.weight"})
    changed = {name for name, x in model.named_parameters() if not torch.equal(x, before[name])}
    assert changed == {"layers.1.mlp.down_proj.weight"}


# ---- calls that are refused, and scopes that end early ----


def test_a_refused_call_leaves_the_cache_as_it_was():
    model, ids = made(plain()), tokens()
    cache = model.new_cache(2, 40)
    model(ids, cache=cache)
    wrong = ids[:, :3].clone()
    wrong[0, 1] = 9999
    for bad, options in ((wrong, {}), (ids[:, :3], {"logits_to_keep": -1})):
        with pytest.raises((IndexError, ValueError)):
            model(bad, cache=cache, **options)
    again = model(ids[:, :3], cache=cache).logits
    fresh = model.new_cache(2, 40)
    model(ids, cache=fresh)
    assert torch.equal(again, model(ids[:, :3], cache=fresh).logits)


def test_layers_are_recomputed_on_what_their_forward_ran_on():
    """The scope ends before the backward."""
    model, ids = made(plain()), tokens()
    with kernels.use("reference"):
        expected = gradients(model, model(ids, ids).loss)
    model.recompute = "layer"
    with kernels.use("reference"):
        loss = model(ids, ids).loss
    assert all(torch.equal(g, expected[name]) for name, g in gradients(model, loss).items())


def test_an_unknown_recompute_is_refused():
    model = made(plain())
    with pytest.raises(ValueError, match="recompute is 'most'; expected 'none' or 'cheap' or 'layer'"):
        model.recompute = "most"


def test_a_hole_in_the_mask_counts_nothing():
    """Tokens on both sides of padding see each other, at the positions that they have without it."""
    model, ids = made(plain(), dtype=torch.float64), tokens()
    holed = torch.cat([ids[:, :4], ids[:, :3], ids[:, 4:]], 1)
    mask = torch.ones_like(holed)
    mask[:, 4:7] = 0
    logits = model(holed, attention_mask=mask).logits
    kept = torch.cat([logits[:, :4], logits[:, 7:]], 1)
    torch.testing.assert_close(kept, model(ids).logits, rtol=0, atol=1e-12)
