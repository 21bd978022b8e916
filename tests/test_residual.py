"Placements of the norm: what the chapter does not show"
import pytest
import torch
import torch.nn as nn

from stabbook.norms import LayerNorm, RMSNorm
from stabbook.reparam import LayerScale
from stabbook.residual import (ALIASES, PLACEMENTS, Beside, Block, ParallelBlock, Residual,
                               placement)

D = 24


@pytest.fixture
def parts():
    "Branches, a stream, and norms with random gains, so that mistaking one shows"
    torch.manual_seed(0)
    made = []

    def make():
        n = RMSNorm(D, 1e-6)
        nn.init.uniform_(n.weight, 0.5, 1.5)
        made.append(n)
        return n
    return nn.Linear(D, D), nn.Linear(D, D), 3 * torch.randn(2, 5, D), make, made


FORMULAS = {
    "pre": lambda h, f, n: h + f(n[0](h)),
    "post": lambda h, f, n: n[0](h + f(h)),
    "reordered": lambda h, f, n: h + n[0](f(h)),
    "sandwich": lambda h, f, n: h + n[1](f(n[0](h))),
    "none": lambda h, f, n: h + f(h),
}


@pytest.mark.parametrize("name", [*PLACEMENTS, *ALIASES])
def test_placement_is_its_formula(parts, name):
    f, _, h, make, made = parts
    block = Residual(f, make, name)
    assert torch.equal(block(h), FORMULAS[placement(name)](h, f, made))
    assert len(made) == {"none": 0, "sandwich": 2}.get(placement(name), 1)


@pytest.mark.parametrize("first", PLACEMENTS)
@pytest.mark.parametrize("second", PLACEMENTS)
def test_block_places_each_branch_on_its_own(parts, first, second):
    f, g, h, make, made = parts
    block = Block(f, g, make, attention_norm_placement=first, mlp_norm_placement=second)
    used = {"none": 0, "sandwich": 2}.get(first, 1)
    middle = FORMULAS[first](h, f, made[:used])
    assert torch.equal(block(h), FORMULAS[second](middle, g, made[used:]))


def test_parallel_shares_one_norm_and_adds_both(parts):
    f, g, h, make, made = parts
    block = ParallelBlock(f, g, make)
    torch.testing.assert_close(block(h), h + f(made[0](h)) + g(made[0](h)))
    assert len(made) == 1


def test_scale_acts_on_the_branch_last(parts):
    f, g, h, make, made = parts
    scale = LayerScale(D, 0.25)
    block = Residual(f, make, "sandwich", scale)
    assert torch.equal(block(h), h + 0.25 * made[1](f(made[0](h))))
    both = ParallelBlock(f, g, make, make_scale=lambda: LayerScale(D, 0.25))
    torch.testing.assert_close(both(h), h + 0.25 * (f(made[2](h)) + g(made[2](h))))


def test_branch_gets_the_arguments(parts):
    _, g, h, make, _ = parts

    class Attention(nn.Module):
        def forward(self, x, rope, mask): return x * rope + mask
    for block in (Block(Attention(), g, make), ParallelBlock(Attention(), g, make)):
        assert not torch.equal(block(h, 2.0, 1.0), block(h, 3.0, 1.0))


@pytest.mark.parametrize("name", ["Pre", "postnorm", "", None, 3, True, "sandwhich"])
def test_unknown_placement(name):
    with pytest.raises(ValueError, match="norm_placement=.* is not one of 'pre'"):
        Residual(nn.Identity(), lambda: RMSNorm(D), name)


def test_one_branch_cannot_be_parallel():
    with pytest.raises(ValueError, match="norm_placement='parallel'"):
        Residual(nn.Identity(), lambda: RMSNorm(D), "parallel")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", [*PLACEMENTS, "parallel"])
def test_every_dtype_and_view(name, dtype):
    f, g, norm = nn.Linear(D, D), nn.Linear(D, D), lambda: LayerNorm(D)
    block = ParallelBlock(f, g, norm) if name == "parallel" else Block(
        f, g, norm, attention_norm_placement=name, mlp_norm_placement=name)
    block, h = block.to(dtype), torch.randn(5, 2, D, dtype=dtype).transpose(0, 1)
    y = block(h)
    assert y.dtype == dtype
    loose = 0.05 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(y, block(h.contiguous()), rtol=loose, atol=loose)


def test_zero_branch_before_a_norm_has_a_gradient_of_one_over_root_eps():
    for eps in (1e-4, 1e-6, 1e-8):
        grads = []
        for name in ("pre", "reordered"):
            last = nn.Linear(D, D, bias=False).double()
            nn.init.zeros_(last.weight)
            h = torch.randn(3, D, generator=torch.Generator().manual_seed(0)).double()
            h = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + eps)
            norm = RMSNorm(D, eps) if name == "reordered" else nn.Identity()
            Residual(last, lambda: norm.double(), name)(h).sum().backward()
            grads.append(last.weight.grad.norm())
        assert (grads[1] / grads[0]).item() == pytest.approx(eps ** -0.5, rel=1e-6)


class Product(nn.Module):
    def forward(self, x, y): return x * y.abs()


@pytest.mark.parametrize("name", PLACEMENTS)
def test_a_branch_beside_another_reads_the_stream(name):
    f, h, norm = nn.Linear(D, D), torch.randn(3, D), lambda: LayerNorm(D, 1e-5)
    N = norm()
    y = f(N(h) if name in ("pre", "sandwich") else h)
    y = N(y) + N(N(h) * h.abs())
    if name in ("reordered", "sandwich"): y = N(y)
    want = N(h + y) if name == "post" else h + y
    got = Residual(f, norm, name, beside=Beside(Product(), norm))(h)
    torch.testing.assert_close(got, want)
    block = Block(nn.Identity(), f, norm, attention_norm_placement="none",
                  mlp_norm_placement=name, beside=Product())
    torch.testing.assert_close(block(h / 2), want)
    with pytest.raises(ValueError, match="'ngpt' must be left out: .* beside the MLP"):
        Block(f, f, norm, mlp_norm_placement="ngpt", beside=Product())


@pytest.mark.parametrize("kind", [Block, ParallelBlock])
def test_blocks_end_with_the_layers_own_embedding_and_a_scalar(kind):
    f, g, norm = nn.Linear(D, D), nn.Linear(D, D), lambda: LayerNorm(D, 1e-5)
    scale = lambda: LayerScale(D, 0.5)
    plain = kind(f, g, norm, make_scale=scale)
    block = kind(f, g, norm, make_scale=scale, per_layer=Product(), scalar=True)
    h, e = torch.randn(3, D), torch.randn(3, D)
    block.scalar.fill_(0.25)
    y = plain(h)
    want = (y + 0.5 * norm()(y * e.abs())) / 4
    torch.testing.assert_close(block(h, per_layer_input=e), want)
