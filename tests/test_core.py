"The checks and their words, and what the rooms share: right values and refusals."
import math

import numpy as np
import pytest
import torch
import torch.utils.checkpoint

from stabbook.core import (at_least_fp32, in_backward, no_autocast, number, one_of,
                           unknown, whole)


@pytest.mark.parametrize("value", [2, 2.0, np.float32(2), np.int64(2), np.float64(2),
                                   torch.tensor(2.0), torch.tensor(2)])
def test_a_number_of_any_library_comes_back_as_a_float(value):
    got = number("x", value, above=0, most=2)
    assert type(got) is float and got == 2


@pytest.mark.parametrize("value", [True, "2", None, [2], math.nan, math.inf, -math.inf,
                                   2j, np.nan,
                                   torch.tensor([2.0]), torch.tensor(math.nan)])
def test_what_is_no_finite_number_is_refused(value):
    with pytest.raises(ValueError, match="x=.* must be a finite number$"):
        number("x", value)


@pytest.mark.parametrize("bounds,inside,outside,rule", [
    (dict(above=0), (1e-9,), (0, -1), "a finite number above 0"),
    (dict(least=0), (0, 3), (-1e-9,), "a finite number from 0 up"),
    (dict(most=1), (1, -5), (1.001,), "a finite number to 1"),
    (dict(above=0, most=1), (1, 0.5), (0, 2), "a finite number above 0 and to 1"),
    (dict(least=0, below=1), (0, 0.99), (1, -1), "a finite number from 0 below 1"),
    (dict(above=0, none=True), (None, 1), (0, "None"),
     "a finite number above 0, or None")])
def test_bounds_and_their_words(bounds, inside, outside, rule):
    for value in inside: assert number("x", value, **bounds) == value
    for value in outside:
        with pytest.raises(ValueError) as error: number("x", value, **bounds)
        assert str(error.value) == f"x={value!r} must be {rule}"


def test_whole_numbers():
    assert whole("n", 1) == 1 and type(whole("n", np.int64(4))) is int
    assert whole("n", 0, least=0) == 0 and whole("n", None, none=True) is None
    for value in (0, -1, 1.0, True, "1", None, math.nan):
        with pytest.raises(ValueError, match="n=.* must be a whole number from 1 up$"):
            whole("n", value)


def test_one_of_takes_what_is_allowed_and_names_the_nearest():
    assert one_of("norm", None, (None, "l2")) is None
    for value, words in (("rmsnrm", "; did you mean 'rmsnorm'\\?$"), ("zzz", "'l2'$"),
                         (torch.ones(2), "'l2'$"), ([], "'l2'$")):
        with pytest.raises(ValueError, match=words):
            one_of("norm", value, ("rmsnorm", "l2"))


def test_unknown_never_proposes_what_was_typed():
    assert unknown("method", "basline", ["baseline"]) == (
        "method 'basline' is not one of baseline; did you mean 'baseline'?")
    assert "did you mean" not in unknown("value", "None", [None, "None"])
    assert unknown("run", "a", []) == "run 'a' is not one of (none)"


def test_half_precision_alone_is_widened():
    for dtype in (torch.float16, torch.bfloat16):
        assert at_least_fp32(torch.ones(1, dtype=dtype)).dtype == torch.float32
    for dtype in (torch.float32, torch.float64, torch.int8, torch.bool):
        x = torch.ones(1, dtype=dtype)
        assert at_least_fp32(x) is x


def test_no_autocast_on_devices_that_know_it_and_that_do_not():
    x = torch.randn(4, 4)
    with torch.autocast("cpu", torch.bfloat16):
        assert (x @ x).dtype == torch.bfloat16
        with no_autocast(x.device): assert (x @ x).dtype == torch.float32
    with no_autocast(torch.device("meta")): pass  # autocast itself raises here


def test_a_forward_knows_whether_it_repeats_another():
    seen = []

    def watched(x):
        seen.append(in_backward())
        return x * x
    x = torch.ones(2, requires_grad=True)
    for reentrant in (False, True):
        y = torch.utils.checkpoint.checkpoint(watched, x, use_reentrant=reentrant)
        y.sum().backward()
    assert seen == [False, True, False, True] and not in_backward()
