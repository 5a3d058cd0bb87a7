"""Rules: views are the rule and its inverse."""

import pytest
import torch

from ligerformer.convert.rules import Concat, Rename, check_table, fused_linear

QKV = {"q_proj": "hf.q_proj", "k_proj": "hf.k_proj", "v_proj": "hf.v_proj"}
ROWS = {"q_proj": 4, "k_proj": 2, "v_proj": 3}


def test_rename_is_the_parameter_itself() -> None:
    parameter = torch.randn(3, 2)
    (view,) = Rename("a", "b").views(parameter)
    assert view.data_ptr() == parameter.data_ptr() and view.shape == (3, 2)


def test_writing_views_and_reading_them_back_is_the_identity() -> None:
    rule = Concat("qkv", ("q", "k", "v"), (4, 2, 3))
    sources = [torch.randn(rows, 5) for rows in rule.rows]
    parameter = torch.full((9, 5), torch.nan)
    for view, source in zip(rule.views(parameter), sources, strict=True):
        view.copy_(source)
    assert torch.equal(parameter, torch.cat(sources))
    assert all(torch.equal(view, source) for view, source in zip(rule.views(parameter), sources, strict=True))


def test_views_of_a_meta_parameter_give_the_checkpoint_shapes() -> None:
    rule = Concat("qkv", ("q", "k", "v"), (4, 2, 3))
    assert [tuple(v.shape) for v in rule.views(torch.empty(9, 5, device="meta"))] == [(4, 5), (2, 5), (3, 5)]
    assert [tuple(v.shape) for v in rule.views(torch.empty(9, device="meta"))] == [(4,), (2,), (3,)]


def test_concat_refuses_a_parameter_of_other_rows() -> None:
    with pytest.raises(ValueError, match=r"qkv has 8 rows; the rule joins 4 \+ 2 \+ 3"):
        Concat("qkv", ("q", "k", "v"), (4, 2, 3)).views(torch.empty(8, 5))


def test_fused_linear_packed_and_apart() -> None:
    packed = fused_linear("layers.0.attention.qkv_proj", QKV, ROWS, packed=True, bias=True)
    assert packed == [
        Concat("layers.0.attention.qkv_proj.weight", ("hf.q_proj.weight", "hf.k_proj.weight", "hf.v_proj.weight"), (4, 2, 3)),
        Concat("layers.0.attention.qkv_proj.bias", ("hf.q_proj.bias", "hf.k_proj.bias", "hf.v_proj.bias"), (4, 2, 3)),
    ]
    apart = fused_linear("layers.0.attention.qkv_proj", QKV, ROWS, packed=False)
    assert apart[1] == Rename("layers.0.attention.qkv_proj.k_proj.weight", "hf.k_proj.weight") and len(apart) == 3


def test_a_table_names_everything_once() -> None:
    check_table([Rename("a", "x"), Rename("b", "y")])
    with pytest.raises(ValueError, match="parameter more than once: a"):
        check_table([Rename("a", "x"), Rename("a", "y")])
    with pytest.raises(ValueError, match="tensor more than once: x"):
        check_table([Rename("a", "x"), Concat("b", ("x", "y"), (1, 1))])
