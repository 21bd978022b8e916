"""Caps, temperature, clip and z-loss: properties, dtypes, compile, bad input."""
import math
import shutil

import numpy as np
import pytest
import torch

from stabbook.softcap import soft_clip, soft_temp, softcap, z_loss

DTYPES = torch.float32, torch.bfloat16, torch.float16, torch.float64
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
caps = pytest.mark.parametrize("cap", [0.5, 1, 5, 30, 50.0])


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


# --- softcap

@caps
@dtypes
def test_bounded_odd_monotone_and_keeps_dtype(cap, dtype):
    z = torch.linspace(-1000, 1000, 999).to(dtype)
    y = softcap(z, cap)
    assert y.dtype == dtype and y.abs().max() <= cap
    assert torch.equal(softcap(-z, cap), -y)
    assert (y.diff() >= 0).all() and y[-1] > 0.99 * cap


@caps
def test_slope_one_at_zero_and_gradcheck(cap):
    zero = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    softcap(zero, cap).backward()
    assert zero.grad.item() == 1
    z = (3 * cap * torch.randn(9, dtype=torch.float64)).requires_grad_()
    assert torch.autograd.gradcheck(lambda z: softcap(z, cap), (z,))
    assert torch.autograd.gradgradcheck(lambda z: softcap(z, cap), (z,))


@caps
def test_equals_the_formula_of_gemma_2(cap):
    z = 100 * torch.randn(50)
    assert torch.equal(softcap(z, cap), torch.tanh(z / cap) * cap)


def test_output_changes_with_the_cap():
    z = 40 * torch.randn(100)
    none, fifty, five = (softcap(z, c) for c in (None, 50, 5))
    assert none is z
    assert (none - fifty).abs().max() > 1 and (fifty - five).abs().max() > 1


def test_keeps_the_argmax_but_not_the_log_probabilities():
    z = 20 * torch.randn(64, 100)
    assert torch.equal(softcap(z, 30).argmax(-1), z.argmax(-1))
    assert (softcap(z, 30).log_softmax(-1) - z.log_softmax(-1)).abs().max() > 1


def test_cap_after_the_mask_leaks_and_before_it_does_not():
    z, future = torch.randn(6, 6).double(), torch.ones(6, 6).triu(1).bool()
    masked = z.masked_fill(future, -math.inf)
    leak = [softcap(masked, c).softmax(-1)[future].max().item() for c in (50, 5, 1)]
    assert leak[0] < 1e-18 < 1e-4 < leak[1] < leak[2] and leak[2] > 0.05
    right = softcap(z, 1).masked_fill(future, -math.inf).softmax(-1)
    assert right[future].max() == 0


def test_nan_is_not_hidden_and_infinity_is_the_cap():
    y = softcap(torch.tensor([math.nan, math.inf, -math.inf]), 50)
    assert y[0].isnan() and y[1:].tolist() == [50, -50]


def test_views_and_empty():
    z = torch.randn(4, 6).T[::2]
    assert torch.equal(softcap(z, 5), softcap(z.contiguous(), 5))
    assert softcap(torch.empty(0), 5).shape == (0,)


BAD = [0, 0.0, -1, -50.0, math.nan, math.inf, -math.inf, True, False, "50", [50]]


@pytest.mark.parametrize("bad", BAD, ids=str)
def test_bad_caps_are_refused_by_name(bad):
    with pytest.raises(
        ValueError, match="cap=.* must be a finite number above 0, or None"
    ):
        softcap(torch.zeros(2), bad)


@pytest.mark.parametrize("kind", [np.float32, np.float64, np.int64, torch.tensor])
def test_numbers_of_other_libraries_are_numbers(kind):
    z = torch.linspace(-90, 90, 7)
    assert torch.equal(softcap(z, kind(30)), softcap(z, 30))
    assert torch.equal(soft_temp(z, kind(2)), 2 * z)


# --- soft_temp and soft_clip

@dtypes
def test_soft_temp(dtype):
    z = torch.randn(5).to(dtype)
    assert torch.equal(soft_temp(z), 0.5 * z) and soft_temp(z).dtype == dtype
    assert torch.equal(soft_temp(z, 1), z)


@pytest.mark.parametrize(
    "bad", [0, -0.5, math.nan, math.inf, True, "0.5", None], ids=str
)
def test_soft_temp_refuses(bad):
    with pytest.raises(ValueError, match="beta=.*must be a finite number above 0"):
        soft_temp(torch.zeros(2), bad)


@dtypes
def test_soft_clip_reaches_both_ends_with_zero_gradient(dtype):
    p = torch.tensor([0.0, 0.02, 0.5, 0.98, 1.0]).to(dtype).requires_grad_()
    y = soft_clip(p)
    y.sum().backward()
    assert y.dtype == dtype and y[[0, 1, 3, 4]].tolist() == [0, 0, 1, 1]
    assert (p.grad != 0).tolist() == [False, False, True, False, False]
    assert y[2].item() == pytest.approx(0.5, abs=1e-2)


def test_soft_clip_formula_and_identity():
    p = torch.rand(100).double()
    want = torch.clip((1.03 + 0.03) * p - 0.03, 0, 1)
    assert torch.equal(soft_clip(p), want)
    assert torch.equal(soft_clip(p, 1.0, 0.0), p)


@pytest.mark.parametrize(
    "zeta, gamma, rule",
    [
        (0.9, -0.03, "zeta=0.9 must be a finite number from 1 up"),
        (1.03, 0.03, "gamma=0.03 must be a finite number to 0"),
        (math.nan, -0.03, "zeta=nan"),
        (1.03, math.nan, "gamma=nan"),
        (math.inf, -0.03, "zeta=inf"),
    ],
)
def test_soft_clip_refuses(zeta, gamma, rule):
    with pytest.raises(ValueError, match=rule):
        soft_clip(torch.zeros(2), zeta, gamma)


# --- z_loss

def test_z_loss_by_hand():
    logits = torch.tensor([[0.0, 0.0], [math.log(3), math.log(1)]])
    want = (math.log(2) ** 2 + math.log(4) ** 2) / 2
    assert z_loss(logits).item() == pytest.approx(want, rel=1e-6)


def test_z_loss_gradient_is_twice_log_z_times_p():
    z = torch.randn(1, 9, dtype=torch.float64, requires_grad=True)
    z_loss(z).backward()
    want = 2 * torch.logsumexp(z, -1, keepdim=True) * z.softmax(-1)
    assert torch.allclose(z.grad, want.detach())
    assert torch.autograd.gradcheck(z_loss, (z,))


def test_z_loss_pulls_from_both_sides():
    for level in (-4.0, 4.0):
        z = torch.full((1, 5), level, dtype=torch.float64, requires_grad=True)
        log_z = torch.logsumexp(z, -1).item()
        z_loss(z).backward()
        after = torch.logsumexp(z - 0.1 * z.grad, -1).item()
        assert abs(after) < abs(log_z) and after * log_z > 0


def test_z_loss_counts_only_what_is_kept():
    z, kept = torch.randn(2, 6, 9, requires_grad=True), torch.rand(2, 6) > 0.5
    got = z_loss(z, kept)
    assert got.item() == pytest.approx(z_loss(z[kept]).item(), rel=1e-6)
    got.backward()
    assert (z.grad.abs().sum(-1) > 0).equal(kept)
    assert z_loss(z, torch.ones(2, 6).bool()).item() == pytest.approx(z_loss(z).item())
    assert z_loss(z, torch.zeros(2, 6).bool()).item() == 0


@dtypes
def test_z_loss_is_at_least_fp32(dtype):
    z = torch.full((3, 256), 11.0).to(dtype)        # squares and sums pass fp16's range
    want = (11 + math.log(256)) ** 2
    assert z_loss(z).dtype == (
        torch.float64 if dtype == torch.float64 else torch.float32
    )
    assert z_loss(z).item() == pytest.approx(want, rel=1e-6)


# --- compile

def test_z_loss_of_a_position_left_out_is_finite_whatever_its_logits():
    z = (
        torch.randn(4, 9)
        .index_fill(0, torch.tensor([1]), -float("inf"))
        .requires_grad_()
    )
    kept = torch.tensor([True, False, True, True])
    z_loss(z, kept).backward()
    assert z.grad.isfinite().all() and z.grad[1].eq(0).all()


def everything(z, kept):
    p = soft_clip(softcap(soft_temp(z), 5.0).softmax(-1))
    return p.sum(-1), z_loss(z, kept)


def check_compiled(backend):
    z, kept = torch.randn(3, 8).T[:, :2], torch.tensor([True] * 5 + [False] * 3)
    got = torch.compile(everything, fullgraph=True, backend=backend)(z, kept)
    for a, b in zip(got, everything(z, kept)):
        assert torch.allclose(a, b, atol=1e-5)


def test_compiles_as_one_graph():
    check_compiled("aot_eager")


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs g++ on a CPU")
def test_compiles_with_inductor():
    check_compiled("inductor")
