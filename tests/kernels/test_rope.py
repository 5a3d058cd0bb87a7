"""Rope and QK-norm with rope: the bits of the eager formula, layouts that attention modules make, and the op as a rotation."""

import pytest
import torch
from torch import Tensor

from ligerformer import kernels
from ligerformer.kernels.qk_norm_rope import _qk_norm_rope_reference
from ligerformer.kernels.rope import _rope_reference

from .test_norms import distance, normal

# batch, tokens, query heads, key heads, head_dim, rotated columns, batches of the tables
SHAPES = [(2, 3, 4, 2, 32, 32, 1), (2, 5, 3, 1, 10, 6, 2), (1, 4, 9, 3, 64, 64, 1), (2, 2, 5, 5, 7, 4, 2), (1, 1, 70, 1, 64, 64, 1)]
each_shape = pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "x".join(map(str, s)))


def tables(batches: int, tokens: int, rotated: int, device: str = "cpu") -> tuple[Tensor, Tensor]:
    angles = normal(batches, tokens, rotated // 2, device=device, seed=9) * 5
    return angles.cos(), angles.sin()


def packed(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Tensor:
    """What one projection to queries, keys and values makes."""
    batch, tokens, q_heads, k_heads, head_dim, _, _ = shape
    return normal(batch, tokens, (q_heads + 2 * k_heads) * head_dim, dtype=dtype, device=device)


def heads(qkv: Tensor, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Queries and keys as views of it."""
    batch, tokens, q_heads, k_heads, head_dim, _, _ = shape
    q, k, _ = qkv.split([q_heads * head_dim, k_heads * head_dim, k_heads * head_dim], dim=-1)
    return q.view(batch, tokens, q_heads, head_dim), k.view(batch, tokens, k_heads, head_dim)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_reference_has_transformers_bits(dtype: torch.dtype) -> None:
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    q, k = normal(2, 7, 3, 16, dtype=dtype), normal(2, 7, 1, 16, dtype=dtype, seed=1)
    cos, sin = tables(2, 7, 16)
    wide = [torch.cat([t, t], dim=-1).to(dtype) for t in (cos, sin)]
    for got, expected in zip(kernels.rope(q, k, cos, sin), llama.apply_rotary_pos_emb(q, k, *wide, unsqueeze_dim=2)):
        assert torch.equal(got, expected)


@each_shape
def test_kernel_has_the_references_bits(shape: tuple[int, ...], device: str, triton_dtype: torch.dtype) -> None:
    qkv = packed(shape, triton_dtype, device)
    cos, sin = tables(shape[6], shape[1], shape[5], device)
    with kernels.use("triton"):
        got = kernels.rope(*heads(qkv, shape), cos, sin)
    for a, b in zip(got, _rope_reference(*heads(qkv, shape), cos, sin)):
        assert torch.equal(a, b) and a.is_contiguous()


@pytest.mark.parametrize("norm", [False, True], ids=["rope", "qk_norm_rope"])
@each_shape
def test_gradients_of_packed_views(shape: tuple[int, ...], norm: bool, device: str, triton_dtype: torch.dtype) -> None:
    """Views of one projection, also as attention hands back its gradients: transposed from (B, H, T, D) memory."""
    qkv = packed(shape, triton_dtype, device).requires_grad_()
    cos, sin = tables(shape[6], shape[1], shape[5], device)
    weights = [normal(shape[4], dtype=triton_dtype, device=device, seed=s).requires_grad_() for s in (1, 2)] if norm else []
    with kernels.use("triton"):
        if norm:
            out = kernels.qk_norm_rope(*heads(qkv, shape), *weights, cos, sin, eps=1e-6)
        else:
            out = kernels.rope(*heads(qkv, shape), cos, sin)
        grads = [normal(*o.transpose(1, 2).shape, dtype=o.dtype, device=device, seed=3).transpose(1, 2) for o in out]
        got = torch.autograd.grad(out, (qkv, *weights), grads)
    exact = [t.detach().double().requires_grad_() for t in (qkv, *weights)]
    views = heads(exact[0], shape)
    exact_out = _qk_norm_rope_reference(*views, *exact[1:], cos, sin, 1e-6, 0.0, "input") if norm else _rope_reference(*views, cos, sin)
    expected = torch.autograd.grad(exact_out, exact, [g.double() for g in grads])
    for a, b in zip((*out, *got), (*exact_out, *expected)):
        assert distance(a.detach(), b.detach()) < 4 * torch.finfo(triton_dtype).eps


@pytest.mark.parametrize("mode", ["reference", "triton"])
def test_rotation(mode: str, device: str) -> None:
    """Position 0 changes nothing, lengths are kept, and products of a query with a key depend on their distance alone."""
    q, k = (normal(1, 1, 1, 8, device=device, seed=s).expand(1, 9, 1, 8) for s in (0, 1))
    angles = torch.arange(9, device=device)[None, :, None] * torch.tensor([1.0, 0.3, 0.1, 0.01], device=device)
    with kernels.use(mode):
        q_out, k_out = kernels.rope(q, k, angles.cos(), angles.sin())
    assert torch.equal(q_out[:, 0], q[:, 0]) and torch.equal(k_out[:, 0], k[:, 0])
    torch.testing.assert_close(q_out.norm(dim=-1), q.norm(dim=-1))
    products = q_out[0, :, 0] @ k_out[0, :, 0].T
    for distance_ in range(-8, 9):
        diagonal = products.diagonal(distance_)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mode", ["reference", "triton"])
def test_tables_of_any_layout(mode: str, device: str) -> None:
    """Half of a table of twice the width, an expanded batch, tables in bf16: read as they lie, cos and sin laid out differently."""
    q, k = normal(2, 3, 2, 8, device=device), normal(2, 3, 1, 8, device=device, seed=1)
    cos, sin = tables(1, 3, 8, device)
    expected = _rope_reference(q, k, cos, sin)
    half = torch.cat([cos, cos], dim=-1)[..., :4]
    with kernels.use(mode):
        for c, s in ((half, sin), (cos.expand(2, 3, 4), sin.expand(2, 3, 4)), (cos.mT.contiguous().mT, sin)):
            for a, b in zip(kernels.rope(q, k, c, s), expected):
                assert torch.equal(a, b)
        rounded = kernels.rope(q, k, cos.bfloat16().float(), sin.bfloat16().float())
        assert all(torch.equal(a, b) for a, b in zip(kernels.rope(q, k, cos.bfloat16(), sin.bfloat16()), rounded))


@pytest.mark.parametrize("mode", ["reference", "triton"])
@pytest.mark.parametrize("casting, offset", [("input", 0.0), ("fp32", 1.0)])
def test_one_pass_is_the_sequence(mode: str, casting: str, offset: float, device: str) -> None:
    """In fp16 the two ways round alike, but where the sums of squares, formed in another order, put a value across an edge."""
    q, k = normal(2, 5, 4, 32, dtype=torch.float16, device=device), normal(2, 5, 2, 32, dtype=torch.float16, device=device, seed=1)
    weights = [normal(32, dtype=torch.float16, device=device, seed=s) for s in (2, 3)]
    cos, sin = tables(1, 5, 16, device)
    with kernels.use(mode):
        got = kernels.qk_norm_rope(q, k, *weights, cos, sin, eps=1e-6, offset=offset, casting=casting)
        normed = [kernels.rms_norm(x, w, eps=1e-6, offset=offset, casting=casting) for x, w in zip((q, k), weights)]
        expected = kernels.rope(*normed, cos, sin)
    for a, b in zip(got, expected):
        assert (a != b).sum() <= (0 if mode == "reference" else a.numel() // 100)


@pytest.mark.parametrize("mode", ["reference", "triton"])
def test_fp32_weights_promote_the_heads(mode: str, device: str) -> None:
    """As under autocast: heads in half precision, weights in fp32; the tables are then not rounded to half either."""
    q, k = (normal(1, 3, n, 16, dtype=torch.float16, device=device, seed=n).requires_grad_() for n in (2, 1))
    weights = [normal(16, device=device, seed=s).requires_grad_() for s in (2, 3)]
    cos, sin = tables(1, 3, 16, device)
    with kernels.use(mode):
        out = kernels.qk_norm_rope(q, k, *weights, cos, sin, eps=1e-6)
        grads = torch.autograd.grad([o.sum() for o in out], (q, k, *weights))
    assert [o.dtype for o in out] == [torch.float32] * 2
    assert [g.dtype for g in grads] == [torch.float16] * 2 + [torch.float32] * 2
    normed = [kernels.rms_norm(x, w, eps=1e-6) for x, w in zip((q, k), weights)]
    # The norm is rounded to fp16 before the weight: where its fp32 value lies at an edge, one fp16 ulp of difference.
    for a, b in zip(out, _rope_reference(*normed, cos, sin)):
        assert distance(a.detach(), b.detach()) < torch.finfo(torch.float16).eps
        assert ((a - b).abs() > 1e-5).sum() <= a.numel() // 20


def test_only_what_arrives_is_rotated_back(device: str) -> None:
    """A gradient to the keys alone gives none to the queries, and no pass over them."""
    q, k = normal(1, 3, 4, 8, device=device).requires_grad_(), normal(1, 3, 2, 8, device=device, seed=1).requires_grad_()
    cos, sin = tables(1, 3, 8, device)
    with kernels.use("triton"):
        _, k_out = kernels.rope(q, k, cos, sin)
        dq, dk = torch.autograd.grad(k_out.sum(), (q, k), allow_unused=True)
    assert dq is None
    exact = k.detach().double().requires_grad_()
    (expected,) = torch.autograd.grad(_rope_reference(exact, exact, cos, sin)[1].sum(), exact)
    assert distance(dk, expected) < 2 * torch.finfo(torch.float32).eps


@pytest.mark.parametrize("name", ["cos", "sin"])
def test_tables_that_want_gradients_are_refused(name: str, device: str) -> None:
    q, k = normal(1, 3, 2, 8, device=device), normal(1, 3, 1, 8, device=device)
    given = dict(zip(("cos", "sin"), tables(1, 3, 8, device)))
    given[name].requires_grad_()
    with pytest.raises(ValueError, match=rf"rope: {name} requires a gradient"):
        kernels.rope(q, k, given["cos"], given["sin"])
