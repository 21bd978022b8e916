"""Embedding: scale against norm, rounding, zero rows, and Gemma's layer."""
import math

import pytest
import torch

from stabbook.embedding import Embedding, PerLayerEmbedding, l2_embedding_norm
from stabbook.norms import RMSNorm

IDS = torch.tensor([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])
VARIANTS = {
    "plain": {},
    "scale": dict(embed_scale=8.0),
    "rmsnorm": dict(embedding_norm="rmsnorm"),
    "layernorm": dict(embedding_norm="layernorm", embedding_norm_gain=True),
    "l2": dict(embedding_norm="l2"),
    "both": dict(embed_scale=8.0, embedding_norm="rmsnorm", embedding_norm_gain=True),
}
every = pytest.mark.parametrize("name", VARIANTS)


def build(name="plain", dtype=torch.float32, **how):
    torch.manual_seed(0)
    return Embedding(16, 64, **VARIANTS[name], **how).to(dtype)


# ---------------------------------------------------------------- the article's formula

@pytest.mark.parametrize(
    "dtype,tolerance",
    [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 0.02)],
)
def test_the_formula_is_an_rmsnorm_without_gain_and_eps(dtype, tolerance):
    e = (torch.randn(3, 5, 64) * 7).to(dtype)
    y = l2_embedding_norm(e)
    assert y.dtype == dtype
    torch.testing.assert_close(
        y, RMSNorm(64, eps=0.0, gain=False)(e), atol=tolerance, rtol=0
    )
    literal = e.double() / e.double().norm(dim=-1, keepdim=True) * 8
    torch.testing.assert_close(y.double(), literal, atol=tolerance, rtol=0)


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16]
)
def test_a_zero_row_is_zero_with_a_finite_gradient(dtype):
    e = torch.randn(4, 8).to(dtype)
    e[1] = 0
    e.requires_grad_()
    y = l2_embedding_norm(e)
    (y * torch.arange(8)).sum().backward()
    assert y[1].abs().max() == 0 and y.isfinite().all()
    assert e.grad.isfinite().all() and e.grad[1].abs().max() < 1e3


@pytest.mark.parametrize("size", [1e-38, 1e-30, 1e-20, 1.0, 1e20, 1e38])
def test_any_size_comes_out_alike(size):
    y = l2_embedding_norm(torch.tensor([[size, -size, size, size]]))
    torch.testing.assert_close(y, torch.tensor([[1.0, -1, 1, 1]]), atol=1e-6, rtol=0)


def test_the_formula_passes_gradcheck():
    e = torch.randn(3, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(l2_embedding_norm, e)


# ------------------------------------------------------------------ scale and norm

def test_a_scale_keeps_the_ratios_of_lengths_and_a_norm_does_not():
    spread = {}
    for name in ("plain", "scale", "rmsnorm"):
        emb = build(name)
        with torch.no_grad():
            emb.weight.mul_(torch.linspace(1, 9, 16)[:, None])
        length = emb(IDS).norm(dim=-1).flatten()
        spread[name] = length / length.mean()
    torch.testing.assert_close(spread["scale"], spread["plain"])
    assert spread["plain"].max() / spread["plain"].min() > 3
    assert spread["rmsnorm"].max() / spread["rmsnorm"].min() < 1.02


def test_nanochat_has_a_root_mean_square_of_one():
    emb = build("rmsnorm", norm_eps=1e-12)
    torch.testing.assert_close(emb(IDS).square().mean(-1), torch.ones(2, 5))
    assert [n for n, _ in emb.named_parameters()] == ["weight"]


def test_bloom_has_a_gain_and_a_bias():
    assert [n for n, _ in build("layernorm").named_parameters()] == \
        ["weight", "norm.weight", "norm.bias"]


@pytest.mark.parametrize("width,rounded", [(2304, 48.0), (3072, 55.5), (5376, 73.5)])
def test_the_constant_is_rounded_to_the_dtype_of_the_weights(width, rounded):
    emb = Embedding(8, width, embed_scale=math.sqrt(width)).bfloat16()
    ids = torch.arange(8)[None]
    assert torch.equal(emb(ids), emb.weight[ids] * rounded)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_gemma(dtype):
    gemma3 = pytest.importorskip("transformers.models.gemma3.modeling_gemma3")
    theirs = gemma3.Gemma3TextScaledWordEmbedding(16, 96, 0, embed_scale=96**0.5).to(
        dtype
    )
    ours = Embedding(16, 96, embed_scale=96**0.5).to(dtype)
    ours.load_state_dict(theirs.state_dict())
    assert torch.equal(ours(IDS), theirs(IDS))


# --------------------------------------------------------------- dtypes, compile, input

@every
@pytest.mark.parametrize(
    "dtype,tolerance", [(torch.bfloat16, 0.02), (torch.float32, 1e-5)]
)
def test_dtypes_agree_with_float64(name, dtype, tolerance):
    emb, exact = build(name, dtype), build(name, dtype).double()
    y, expected = emb(IDS), exact(IDS)
    assert y.dtype == dtype and y.shape == (2, 5, 64)
    assert (y.double() - expected).norm() < tolerance * expected.norm()


@every
def test_views_and_the_compiler(name):
    emb = build(name)
    view = IDS.t().contiguous().t()
    assert not view.is_contiguous()
    torch.testing.assert_close(emb(view), emb(IDS))
    torch._dynamo.reset()
    compiled = torch.compile(emb, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(IDS), emb(IDS))


@pytest.mark.parametrize(
    "how,words",
    [
        (dict(embed_scale=0), "embed_scale=0"),
        (dict(embed_scale=math.nan), "embed_scale=nan"),
        (dict(embed_scale=math.inf), "embed_scale=inf"),
        (dict(embedding_norm="rms"), "embedding_norm='rms' is not one of 'rmsnorm'"),
        (dict(embedding_norm="layer_norm"), "embedding_norm.*did you mean 'layernorm'"),
    ],
)
def test_bad_settings_are_refused_by_name(how, words):
    with pytest.raises(ValueError, match=words):
        Embedding(16, 8, **how)


def test_bad_sizes_are_refused_by_name():
    with pytest.raises(
        ValueError, match="vocab_size=0 must be a whole number from 1 up"
    ):
        Embedding(0, 8)
    with pytest.raises(
        ValueError, match="hidden_size=0 must be a whole number from 1 up"
    ):
        Embedding(8, 0)


@torch.no_grad()
def test_an_embedding_for_each_layer_by_hand():
    torch.manual_seed(0)
    each = PerLayerEmbedding(16, 8, 3, 4).double()
    nn_gain = each.norm.weight.normal_()
    ids, x = torch.tensor([[3, 1], [4, 1]]), torch.randn(2, 2, 8).double()
    got = each(ids, x)
    for layer in range(3):
        part = slice(4 * layer, 4 * layer + 4)
        table = each.table.weight[ids][..., part] * 2  # root of 4
        y = x @ each.proj.weight[part].T / 8 ** 0.5
        y = y / (y.square().mean(-1, keepdim=True) + 1e-6).sqrt() * nn_gain
        torch.testing.assert_close(
            got[:, :, layer], (table + y) / 2**0.5, rtol=1e-12, atol=1e-12
        )


@pytest.mark.parametrize("sizes,words", [
    ((16, 8, 0, 4), "num_hidden_layers=0 must be a whole number from 1 up"),
    ((16, 8, 2, 0), "hidden_size_per_layer_input=0 must be a whole number from 1 up"),
    ((0, 8, 2, 4), "vocab_size=0 must be a whole number from 1 up")])
def test_sizes_of_an_embedding_for_each_layer(sizes, words):
    with pytest.raises(ValueError, match=words): PerLayerEmbedding(*sizes)


def test_an_embedding_is_drawn_by_name_and_its_norm_goes_back():
    assert Embedding.drawn == ("weight",) and not hasattr(PerLayerEmbedding, "drawn")
    emb = Embedding(16, 8, embedding_norm="layernorm", embedding_norm_gain=True)
    with torch.no_grad():
        for p in emb.parameters(): p.fill_(7)
    for module in emb.modules(): module.reset_parameters()
    assert (emb.weight == 7).all()  # Of whoever has the seed
    assert (emb.norm.weight == 1).all() and (emb.norm.bias == 0).all()
