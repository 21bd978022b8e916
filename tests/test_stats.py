"""Numbers of tensors: the largest logit, the entropy, RMS and update ratio."""
import math

import pytest
import torch

from stabbook.stats import attention_stats, rms, update_ratio


def test_largest_logit_is_a_visible_one():
    z, allowed = (
        torch.tensor([[[[1.0, 7.0], [3.0, 2.0]]]]),
        torch.ones(2, 2).tril().bool(),
    )
    p = z.masked_fill(~allowed, -math.inf).softmax(-1)
    assert attention_stats(z, p, allowed)[0].tolist() == [3.0]


def test_entropy_of_uniform_attention():
    z = torch.zeros(2, 3, 5, 64)
    largest, entropy = attention_stats(z, z.softmax(-1), torch.ones(5, 64).bool())
    assert (
        entropy.tolist() == pytest.approx([math.log(64)] * 3)
        and largest.tolist() == [0] * 3
    )


def test_a_sink_is_one_more_outcome():
    z = torch.zeros(1, 1, 1, 3)
    p = torch.full((1, 1, 1, 4), 0.25)
    assert attention_stats(z, p, torch.ones(1, 3).bool())[1].item() == pytest.approx(
        math.log(4)
    )


def test_rows_that_are_not_real_count_nowhere():
    z = torch.tensor([[1.0, 0.0], [90.0, 0.0]]).expand(2, 1, 2, 2).clone()
    p = z.softmax(-1)
    p[0, 0, 1] = math.nan
    real = torch.tensor([[True, False], [True, True]])[:, None]
    seen = torch.ones(2, 2).bool()
    one = -(p[0, 0, 0] * p[0, 0, 0].log()).sum().item()
    largest, entropy = attention_stats(z, p, seen, real)
    assert (
        entropy.item() == pytest.approx(2 * one / 3, rel=1e-5) and largest.item() == 90
    )
    assert attention_stats(z, p, seen, real & ~real[1:])[0].item() == -math.inf
    first = attention_stats(z, p, seen, torch.tensor([[True, False]])[:, None])
    assert first[0].item() == 1 and first[1].item() == pytest.approx(one, rel=1e-5)


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64]
)
def test_rms_does_not_overflow(dtype):
    assert rms(torch.full((10, 3), 1024.0, dtype=dtype)).item() == 1024
    assert rms(torch.ones(2, dtype=dtype)).dtype == (
        torch.float64 if dtype == torch.float64 else torch.float32)
    assert not rms(torch.ones(2, requires_grad=True)).requires_grad


def test_update_ratio():
    w = torch.randn(5, 7)
    assert update_ratio(w, 1.25 * w).item() == pytest.approx(0.25)
    assert update_ratio(w, w) == 0 == update_ratio(0 * w, 0 * w)
    assert update_ratio(0 * w, w) == math.inf
