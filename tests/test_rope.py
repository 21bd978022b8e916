"""Rotary embedding against Transformers, its invariances, dtypes, compile, bad input."""  # noqa: E501
import shutil

import pytest
import torch

from stabbook.norms import L2Norm, LayerNorm, RMSNorm
from stabbook.rope import (RotaryEmbedding, check_rope_scaling, rope_frequencies,
                           rotary_angles, rotate_pairs, swap_pairs)

B, T, H, C = 2, 7, 3, 16
layouts = pytest.mark.parametrize("interleaved", [False, True])


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def queries(dtype=torch.float32):
    return torch.randn(B, T, H, C, dtype=torch.float64).to(dtype)


# --- against Transformers

def transformers_module(family):
    pytest.importorskip("transformers")
    from importlib import import_module
    return import_module(f"transformers.models.{family}.modeling_{family}")


@pytest.mark.parametrize("family, interleaved, partial", [
    ("llama", False, 1.0), ("cohere", True, 1.0), ("glm", True, 0.5),
    ("glm4_moe", False, 0.5)])
def test_equals_transformers(family, interleaved, partial):
    module = transformers_module(family)
    q, k, positions = queries(), queries(), torch.arange(T) + 1000
    angles = positions.float()[:, None] * rope_frequencies(C, 10_000.0, partial)
    twice = (angles.repeat_interleave(2, -1) if family == "cohere"
             else torch.cat((angles, angles), -1))[None]
    want = module.apply_rotary_pos_emb(q.transpose(1, 2), k.transpose(1, 2),
                                       twice.cos(), twice.sin())
    rotate = RotaryEmbedding(C, partial_rotary_factor=partial,
                             interleaved=interleaved)(positions)
    for ours, theirs in zip((rotate(q), rotate(k)), want):
        assert torch.allclose(ours.transpose(1, 2), theirs, atol=1e-6)
    other = RotaryEmbedding(C, partial_rotary_factor=partial,
                            interleaved=not interleaved)(positions)
    assert not torch.allclose(other(q).transpose(1, 2), want[0], atol=1e-2)


def test_frequencies_equal_transformers():
    module = transformers_module("llama")
    from transformers import LlamaConfig
    config = LlamaConfig(hidden_size=4 * C, num_attention_heads=4, head_dim=C)
    cos, sin = module.LlamaRotaryEmbedding(config)(
        torch.empty(0), torch.arange(T)[None]
    )
    rotation = RotaryEmbedding(C)(torch.arange(T))
    assert torch.allclose(rotation.cos[:, :, 0], cos, atol=1e-6)
    assert torch.allclose(rotation.sin[:, :, 0], sin, atol=1e-6)

# --- rescaled frequencies

LONG = dict(factor=8.0, original_max_position_embeddings=64)
RECIPES = {
    "linear": dict(rope_type="linear", factor=4.0),
    "back": dict(rope_type="linear", factor=-1.0),
    "llama3": dict(
        rope_type="llama3", low_freq_factor=1.0, high_freq_factor=4.0, **LONG
    ),
    "yarn": dict(rope_type="yarn", **LONG),
    "yarn_ramp": dict(
        rope_type="yarn", truncate=False, beta_fast=4.0, beta_slow=0.5, **LONG
    ),
    "yarn_factor": dict(rope_type="yarn", attention_factor=1.5, **LONG),
    "yarn_mscale": dict(rope_type="yarn", mscale=0.7, mscale_all_dim=1.0, **LONG),
    "proportional": dict(rope_type="proportional"),
}


@pytest.mark.parametrize("partial", [0.5, 1.0])
@pytest.mark.parametrize("name", RECIPES)
def test_scalings_equal_transformers(name, partial):
    module = transformers_module("llama")
    from transformers import LlamaConfig
    recipe = dict(RECIPES[name])
    if name == "back": recipe["factor"] = 1.0
    config = LlamaConfig(
        hidden_size=128,
        num_attention_heads=4,
        head_dim=32,
        max_position_embeddings=512,
        rope_parameters=dict(rope_theta=5e4, partial_rotary_factor=partial, **recipe),
    )
    theirs = module.LlamaRotaryEmbedding(config)
    ours = RotaryEmbedding(32, rope_theta=5e4, partial_rotary_factor=partial,
                           rope_scaling=RECIPES[name])
    frequencies = rope_frequencies(32, 5e4, partial, rope_scaling=ours.rope_scaling)
    sign = -1 if name == "back" else 1
    assert torch.equal(frequencies, sign * theirs.inv_freq)
    assert ours.factor == theirs.attention_scaling
    positions = torch.arange(500)
    cos, sin = theirs(torch.empty(0), positions[None])
    rotation = ours(positions)
    assert torch.equal(rotation.cos[:, :, 0], cos)
    assert torch.equal(rotation.sin[:, :, 0], sign * sin)
    plain = rope_frequencies(32, 5e4, partial)
    if name != "proportional" or partial < 1:
        assert plain.shape != frequencies.shape or not torch.equal(plain, frequencies)


@pytest.mark.parametrize(
    "value, words",
    [
        ({}, "must be a mapping with rope_type"),
        (3, "must be a mapping"),
        ("yarn", "must be a mapping"),
        (dict(rope_type="yarm"), "did you mean 'yarn'"),
        (dict(rope_type="yarn", factor=2.0), "original_max_position_embeddings too"),
        (
            dict(rope_type="linear", factor=2.0, rope_theta=1e4),
            "'rope_theta' is not one of",
        ),
        (dict(rope_type="linear", factor=0), "factor'.=0 must be"),
        (dict(rope_type="linear", factor=True), "factor'.=True must be"),
        (
            dict(
                rope_type="llama3",
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                factor=-2.0,
                original_max_position_embeddings=64,
            ),
            "factor'.=-2.0 must be",
        ),
        (
            dict(rope_type="yarn", truncate=1, **LONG),
            "truncate'.=1 must be True or False",
        ),
    ],
)
def test_bad_scalings_are_refused(value, words):
    with pytest.raises(ValueError, match=words): RotaryEmbedding(C, rope_scaling=value)


def test_scalings_have_one_form():
    a = check_rope_scaling(dict(rope_type="linear", factor=4))
    assert (
        a
        == check_rope_scaling([["factor", 4.0], ["rope_type", "linear"]])
        == check_rope_scaling(a)
    )
    assert hash(a) and isinstance(dict(a)["factor"], float)
    b = dict(rope_type="yarn", attention_factor=None, **LONG)
    assert check_rope_scaling(b) == check_rope_scaling(RECIPES["yarn"])


def test_proportional_takes_any_even_head():
    "A quarter of 12 channels is odd, but the whole head is the ladder."
    rope = RotaryEmbedding(12, partial_rotary_factor=0.25,
                           rope_scaling={"rope_type": "proportional"})
    x = torch.randn(1, 5, 1, 12)
    y = rope(torch.arange(5))(x)
    still = torch.ones(12, dtype=torch.bool).index_fill(0, torch.tensor([0, 6]), False)
    assert torch.equal(y[..., still], x[..., still])
    assert (y - x)[:, 1:][..., ~still].abs().min() > 0


def test_yarn_refuses_a_base_without_a_logarithm():
    with pytest.raises(
        ValueError, match="rope_theta=1.0 must be a finite number above 1"
    ):
        RotaryEmbedding(C, rope_theta=1.0, rope_scaling=RECIPES["yarn"])
    RotaryEmbedding(C, rope_theta=1.0, rope_scaling=RECIPES["linear"])


# --- what a rotation keeps

@layouts
@pytest.mark.parametrize("partial", [0.25, 0.5, 1.0])
def test_keeps_norms_and_inverts(interleaved, partial):
    rope = RotaryEmbedding(C, partial_rotary_factor=partial, interleaved=interleaved)
    x, positions = queries(torch.float64), torch.arange(T)
    y = rope(positions, torch.float64)(x)
    assert torch.allclose(y.norm(dim=-1), x.norm(dim=-1), atol=1e-12)
    assert torch.allclose(rope(-positions, torch.float64)(y), x, atol=1e-12)
    assert not torch.allclose(y, x, atol=0.1)
    assert torch.equal(y[..., int(C * partial):], x[..., int(C * partial):])


@layouts
def test_equals_complex_multiplication(interleaved):
    x, positions = queries(torch.float64), torch.arange(T)
    f = rope_frequencies(C).double()
    turn = torch.polar(torch.ones(T, C // 2).double(), positions[:, None] * f)[:, None]
    a, b = (x[..., ::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)
    z = torch.complex(a, b) * turn
    y = RotaryEmbedding(C, interleaved=interleaved)(positions, torch.float64)(x)
    got = (y[..., ::2], y[..., 1::2]) if interleaved else y.chunk(2, -1)
    assert torch.allclose(got[0], z.real, atol=1e-12)
    assert torch.allclose(got[1], z.imag, atol=1e-12)


def test_layouts_differ_by_a_permutation():
    order = torch.arange(C).view(2, C // 2).T.flatten()
    x, positions = queries(), torch.arange(T)
    half, inter = RotaryEmbedding(C), RotaryEmbedding(C, interleaved=True)
    assert torch.equal(inter(positions)(x[..., order]), half(positions)(x)[..., order])
    assert not torch.allclose(inter(positions)(x), half(positions)(x), atol=0.1)


def scores(q, k, rope, shift, before=lambda x: x, after=lambda x: x):
    rotate = rope(torch.arange(T) + shift, torch.float64)
    q, k = (after(rotate(before(x))) for x in (q, k))
    return torch.einsum("bqhc,bkhc->bhqk", q, k)


def tied(interleaved):
    norm = RMSNorm(C).double()
    pairs = torch.randn(C // 2).double()
    norm.weight.data = pairs.repeat_interleave(2) if interleaved else pairs.repeat(2)
    return norm


def random_gain(norm):
    norm.double().weight.data.normal_()
    return norm


@layouts
@pytest.mark.parametrize("name, make, safe", [
    ("no norm", lambda i: (lambda x: x), True),
    ("rms", lambda i: RMSNorm(C, gain=False), True),
    ("l2", lambda i: L2Norm(C), True),
    ("tied", tied, True),
    ("tied for the other layout", lambda i: tied(not i), False),
    ("gain", lambda i: random_gain(RMSNorm(C)), False),
    ("layernorm", lambda i: LayerNorm(C, gain=False), False)])
def test_shift_by_37(interleaved, name, make, safe):
    rope, norm = RotaryEmbedding(C, interleaved=interleaved), make(interleaved)
    q, k = queries(torch.float64), queries(torch.float64)
    gap = lambda **where: (scores(q, k, rope, 37, **where)
                           - scores(q, k, rope, 0, **where)).abs().max().item()
    assert gap(before=norm) < 1e-11                  # before the rotation all are safe
    if safe: assert gap(after=norm) < 1e-11
    else: assert gap(after=norm) > 1e-2


@layouts
def test_commutes_to_1e_15(interleaved):
    rotate = RotaryEmbedding(C, interleaved=interleaved)(torch.arange(T), torch.float64)
    x = queries(torch.float64)
    for norm in (RMSNorm(C, gain=False), tied(interleaved)):
        assert (norm(rotate(x)) - rotate(norm(x))).abs().max() < 5e-15
    broken = random_gain(RMSNorm(C))
    assert (broken(rotate(x)) - rotate(broken(x))).abs().max() > 0.5


def test_only_the_difference_of_positions_counts_but_it_does_count():
    rope, q, k = RotaryEmbedding(C), queries(torch.float64), queries(torch.float64)
    one = rope(torch.tensor([3]), torch.float64)
    two = rope(torch.tensor([4]), torch.float64)
    z = lambda a, b: (a(q[:, :1]) * b(k[:, :1])).sum(-1)
    assert torch.allclose(z(one, one), (q[:, :1] * k[:, :1]).sum(-1))
    assert (z(two, one) - z(one, one)).abs().max() > 1e-2


# --- positions and dtypes

@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.float32])
def test_position_dtypes_agree(dtype):
    x, rope = queries(), RotaryEmbedding(C)
    assert torch.equal(rope(torch.arange(T).to(dtype))(x), rope(torch.arange(T))(x))


def test_positions_per_sequence():
    x, rope = queries(), RotaryEmbedding(C)
    positions = torch.stack((torch.arange(T), torch.arange(T) + 5))
    y = rope(positions)(x)
    for b in range(B):
        assert torch.allclose(y[b:b + 1], rope(positions[b])(x[b:b + 1]), atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_positions_in_half_precision_are_refused(dtype):
    with pytest.raises(ValueError, match="give integers"):
        RotaryEmbedding(C)(torch.arange(4).to(dtype))


@layouts
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_keeps_dtype_on_views(dtype, interleaved):
    x = torch.randn(B, H, T, 2 * C).to(dtype).transpose(1, 2)[..., ::2]
    rotate = RotaryEmbedding(C, interleaved=interleaved)(torch.arange(T), dtype)
    assert not x.is_contiguous() and rotate(x).dtype == dtype
    assert torch.equal(rotate(x), rotate(x.contiguous()))


def test_a_bf16_model_keeps_fp32_angles_far_out():
    far = torch.tensor([100_000])
    model = torch.nn.ModuleDict({"rope": RotaryEmbedding(C)}).bfloat16()
    truth = far.double()[:, None] * rope_frequencies(C).double()
    got = model["rope"](far, torch.bfloat16).cos[0, :, 0, :C // 2]
    assert got.dtype == torch.float32
    assert (got - truth.cos()).abs().max() < 0.01
    cast = far.float()[:, None] * rope_frequencies(C).bfloat16().float()
    assert (cast.cos() - truth.cos()).abs().max() > 0.5
    assert list(model.state_dict()) == []


def test_fp64_angles_do_not_go_through_fp32():
    rotation = RotaryEmbedding(C)(torch.tensor([123_457]), torch.float64)
    truth = 123_457 * rope_frequencies(C).double()
    assert (rotation.cos[0, 0, 0, :C // 2] - truth.cos()).abs().max() < 1e-12


# --- compile

@layouts
def test_compiles_as_one_graph(interleaved):
    rope = RotaryEmbedding(C, partial_rotary_factor=0.5, interleaved=interleaved)
    f = lambda x, positions: rope(positions)(x)
    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    a, b = queries().requires_grad_(), None
    b = a.detach().clone().requires_grad_()
    up = torch.randn(B, T, H, C)
    compiled(a, torch.arange(T)).backward(up), f(b, torch.arange(T)).backward(up)
    assert torch.allclose(a.grad, b.grad, atol=1e-6)
    assert torch.allclose(
        compiled(a, torch.arange(T)), f(b, torch.arange(T)), atol=1e-6
    )


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs g++ on a CPU")
def test_compiles_with_inductor():
    f = lambda x, positions: RotaryEmbedding(C)(positions)(x)
    x, positions = queries(), torch.arange(T) + 500
    got = torch.compile(f, fullgraph=True)(x, positions)
    assert torch.allclose(got, f(x, positions), atol=1e-4)


def test_gradcheck():
    rotate = RotaryEmbedding(4)(torch.arange(2), torch.float64)
    x = torch.randn(1, 2, 1, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(rotate, (x,))


# --- bad input

@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: RotaryEmbedding(7), "head_dim=7.*must be even and above 0"),
        (
            lambda: RotaryEmbedding(8, partial_rotary_factor=0.1),
            "gives 0 rotary channels",
        ),
        (
            lambda: RotaryEmbedding(8, partial_rotary_factor=1.5),
            "partial_rotary_factor=1.5 must be a finite number above 0 and to 1",
        ),
        (
            lambda: RotaryEmbedding(8, partial_rotary_factor=float("nan")),
            "partial_rotary_factor=nan must be",
        ),
        (
            lambda: RotaryEmbedding(8, rope_theta=0.0),
            "rope_theta=0.0 must be a finite number above 0",
        ),
        (
            lambda: RotaryEmbedding(8)(torch.arange(2))(torch.ones(1, 2, 1, 16)),
            "16 channels a head.*head_dim=8",
        ),
    ],
)
def test_refuses(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@layouts
def test_rotate_pairs_is_a_quarter_turn(interleaved):
    x = torch.randn(3, 8)
    y = rotate_pairs(x, interleaved)
    assert torch.equal(rotate_pairs(y, interleaved), -x)
    assert ((x * y).sum(-1)).abs().max() < 1e-6


def test_angles_have_both_channels_of_a_pair():
    f = torch.tensor([1.0, 0.5])
    assert rotary_angles(torch.tensor([2]), f).tolist() == [[[2, 1, 2, 1]]]
    assert rotary_angles(torch.tensor([2]), f, True).tolist() == [[[2, 2, 1, 1]]]


@pytest.mark.parametrize("interleaved", [False, True])
def test_three_ways_to_round_a_rotation(interleaved):
    "By hand, on complex numbers' real parts; in fp32 all three are one."
    q, at = queries(torch.bfloat16), torch.arange(9)
    make = lambda p: RotaryEmbedding(
        q.shape[-1], interleaved=interleaved, rope_precision=p
    )
    at = torch.arange(q.shape[1])
    plain = make("input")(at)
    cos, turn, other = plain.cos, plain.turn, swap_pairs(q, interleaved)
    rounded = cos.bfloat16(), turn.bfloat16()
    assert torch.equal(plain(q), q * rounded[0] + other * rounded[1])
    mixed = q.float() * rounded[0].float() + other.float() * rounded[1].float()
    assert torch.equal(make("mixed")(at)(q), mixed.bfloat16())
    assert torch.equal(
        make("fp32")(at)(q), (q.float() * cos + other.float() * turn).bfloat16()
    )
    for dtype in (torch.float32, torch.float64):
        wide = queries(dtype)
        want = make("input")(at, dtype)(wide)
        assert want.dtype == dtype
        for p in ("mixed", "fp32"): assert torch.equal(make(p)(at, dtype)(wide), want)
    with pytest.raises(
        ValueError, match="rope_precision='bf16' is not one of 'input', 'mixed', 'fp32'"
    ):
        make("bf16")
