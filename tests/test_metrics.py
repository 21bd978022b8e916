"""Metrics against hand-computed cases, scipy, statsmodels and pandas."""
import math
import subprocess
import sys
import warnings

import numpy as np
import pandas as pd
import pytest

from stabbook import metrics as M

stats = pytest.importorskip("scipy.stats")


@pytest.fixture(autouse=True)
def no_warnings():
    "No metric may warn, whatever the runs did."
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def test_import_is_cheap():
    "Neither torch nor a plotting library comes with the formulas."
    code = ("import sys, importlib.util as u\n"
            f"s = u.spec_from_file_location('m', {M.__file__!r})\n"
            "m = u.module_from_spec(s); sys.modules['m'] = m; s.loader.exec_module(m)\n"
            "print([x for x in ('torch', 'scipy.stats', 'matplotlib', 'pandas')"
            " if x in sys.modules])")
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert out.stdout.strip() == "[]", out.stdout + out.stderr


# --- verdict

def test_verdicts_in_order_of_gravity():
    got = M.verdict([2.5, np.nan, np.inf, -np.inf, 206, 3.1], 5.55, 2.4)
    assert list(got) == ["ok"] + ["non_finite"] * 3 + ["above_initial", "derailed"]


def test_verdict_keeps_shape_index_and_scalar_type():
    s = pd.Series([2.5, 3.1], index=[7, 3], name="final_loss")
    got = M.verdict(s, 5.5, 2.4)
    assert isinstance(got, pd.Series) and list(got.index) == [7, 3]
    assert isinstance(M.verdict(2.5, 5.5), str)
    assert M.diverged(3.1, 5.5, 2.4) is True and M.diverged(2.5, 5.5, 2.4) is False
    assert M.diverged(s, 5.5, 2.4).tolist() == [False, True]
    assert M.diverged(s, 5.5, 2.4).dtype == bool
    assert M.diverged([2.5, 3.1], 5.5, 2.4).dtype == bool


def test_verdict_per_run_references():
    got = M.verdict([3.0, 3.0, 3.0], [5.0, 2.9, 5.0], [2.9, 2.0, 2.0])
    assert list(got) == ["ok", "above_initial", "derailed"]


def test_thresholds_are_strict_and_arguments():
    assert M.verdict(2.5, 5, 2.25, margin=0.25) == "ok"
    assert M.verdict(2.51, 5, 2.25, margin=0.25) == "derailed"
    assert M.verdict(2.51, 5, 2.25, margin=math.inf) == "ok"
    assert M.verdict(5.0, 5.0) == "ok"
    assert M.verdict(5.1, 5.0) == "above_initial"
    assert M.verdict(5.1, 5.0, slack=0.2) == "ok"


def test_slow_runs_are_not_derailed_but_may_still_explode():
    got = M.verdict([4.0, 4.0, 4.0, 9.0, np.nan], 5.5, 2.4,
                    learning_rate=[.001, .01, .1, .001, .001], best_rate=.01)
    assert list(got) == ["ok", "derailed", "derailed", "above_initial", "non_finite"]


def test_unknown_best_means_not_derailed():
    assert M.verdict(3.0, 5.5, np.nan) == "ok"


@pytest.mark.parametrize("kwargs, words", [
    (dict(final_loss=[1, 2], initial_loss=[1, 2, 3]), ["final_loss", "initial_loss"]),
    (dict(final_loss="high", initial_loss=5), ["final_loss='high'", "number"]),
    (dict(final_loss=1, initial_loss=5, margin=0), ["margin=0", "above 0"]),
    (dict(final_loss=1, initial_loss=5, margin=math.nan), ["margin=nan"]),
    (dict(final_loss=1, initial_loss=5, slack=-1), ["slack=-1"]),
    (dict(final_loss=1, initial_loss=5, best_rate=.1), ["learning_rate", "both"]),
])
def test_verdict_refuses(kwargs, words):
    with pytest.raises(ValueError) as e: M.verdict(**kwargs)
    assert all(w in str(e.value) for w in words), e.value


def test_best_cell_uses_medians_and_survives_nan():
    rates = [.1, .01, .1, .01, .1, .01]
    assert M.best_cell(rates, [2.1, 2.5, 2.9, np.nan, 3, 2.6]) == (.01, 2.6)
    assert all(map(math.isnan, M.best_cell([.1, .1], [np.nan, np.inf])))
    rate, loss = M.best_cell([.1, .1, .01, .01], [2.0, np.inf, 2.4, 2.6])
    assert (rate, loss) == (.01, 2.5)


def test_departure():
    ref = np.linspace(5, 2, 200)
    run = ref.copy(); run[50:60] += 2; run[120:] += 1
    assert M.departure(run, ref, window=1) == 120
    run[150] = np.nan
    assert M.departure(run, ref, window=1) == 120
    assert M.departure(ref, ref) is None
    assert M.departure(ref + 1, ref) == 0
    assert 120 < M.departure(run, ref, window=10) < 130
    with pytest.raises(ValueError, match="same length"): M.departure(run, ref[:-1])


# --- proportions

@pytest.mark.parametrize("n", [1, 2, 5, 100])
@pytest.mark.parametrize("confidence", [0.5, 0.95, 0.99])
def test_wilson_against_statsmodels_and_scipy(n, confidence):
    prop = pytest.importorskip("statsmodels.stats.proportion")
    for k in range(n + 1):
        got = M.wilson_interval(k, n, confidence)
        want = prop.proportion_confint(k, n, alpha=1 - confidence, method="wilson")
        assert got == pytest.approx(want, abs=1e-12)
        ci = stats.binomtest(k, n).proportion_ci(confidence, method="wilson")
        assert got == pytest.approx((ci.low, ci.high), abs=1e-12)


def test_wilson_ends_are_exact_and_arrays_work():
    low, high = M.wilson_interval(np.array([0, 3, 5]), 5)
    assert low[0] == 0.0 and high[2] == 1.0 and low.shape == (3,)
    assert (low[1], high[1]) == pytest.approx(M.wilson_interval(3, 5))


@pytest.mark.parametrize("k, n, words", [
    (6, 5, ["k=6", "n=5", "at most n"]), (0, 0, ["n=0", "at least 1"]),
    (-1, 5, ["k=-1", "at least 0"]), (1.5, 5, ["k=1.5", "whole"]),
    (math.nan, 5, ["k=nan"]), (1, math.inf, ["n=inf"]), ([1, 2], [5], ["same length"]),
])
def test_counts_refused(k, n, words):
    with pytest.raises(ValueError) as e: M.wilson_interval(k, n)
    assert all(w in str(e.value) for w in words), e.value


def test_confidence_refused():
    with pytest.raises(ValueError, match="confidence=95"): M.wilson_interval(1, 2, 95)


@pytest.mark.parametrize("cells", [(12, 100, 2, 100), (3, 3, 0, 3), (5, 8, 4, 9)])
def test_differences_against_scipy_and_statsmodels(cells):
    prop = pytest.importorskip("statsmodels.stats.proportion")
    k1, n1, k2, n2 = cells
    want = stats.fisher_exact([[k1, n1 - k1], [k2, n2 - k2]])[1]
    assert M.fisher_test(*cells) == pytest.approx(want)
    d, low, high = M.difference_interval(*cells)
    want = prop.confint_proportions_2indep(*cells, method="newcomb", compare="diff")
    assert (low, high) == pytest.approx(want, abs=1e-9)
    assert low <= d == k1 / n1 - k2 / n2 <= high


def test_differences_name_the_field():
    with pytest.raises(ValueError, match="k2=4 with n2=3: must be at most n2"):
        M.fisher_test(1, 3, 4, 3)


def test_holm_against_statsmodels():
    multi = pytest.importorskip("statsmodels.stats.multitest")
    p = np.random.default_rng(0).uniform(size=12) ** 3
    assert M.holm(p) == pytest.approx(multi.multipletests(p, method="holm")[1])
    with pytest.raises(ValueError, match="1.2"): M.holm([0.1, 1.2])


# --- sensitivity, spikes, perplexity

def test_lr_sensitivity_by_hand():
    assert M.lr_sensitivity([.01, .1, 1], [2, 3, 206], 5) == pytest.approx(4 / 3)
    assert M.lr_sensitivity([.01, .1, 1], [2, 3, np.nan], 5) == pytest.approx(4 / 3)
    assert M.lr_sensitivity([.01], [2], 5) == 0
    # log weights: the gap of a decade weighs ten times the gap of a tenth of one
    rates = [1e-3, 1e-2, 10**-1.9]
    got = M.lr_sensitivity(rates, [2, 3, 4], 5, log_weights=True)
    assert got == pytest.approx((0.5 * 1 * (0 + 1) + 0.5 * 0.1 * (1 + 2)) / 1.1)
    shuffled = M.lr_sensitivity(rates[::-1], [4, 3, 2], 5, log_weights=True)
    assert shuffled == pytest.approx(got)


@pytest.mark.parametrize("rates, losses, start, words", [
    ([.1, .2], [1], 5, ["rates has 2", "losses has 1"]), ([], [], 5, ["empty"]),
    ([0.1, -1], [1, 2], 5, ["rates", "-1.0", "positive"]),
    ([.1, .1], [1, 2], 5, ["twice"]), ([.1], [1], math.nan, ["initial_loss=nan"]),
    ([[.1]], [[1]], 5, ["shape (1, 1)"]),
])
def test_lr_sensitivity_refuses(rates, losses, start, words):
    with pytest.raises(ValueError) as e: M.lr_sensitivity(rates, losses, start)
    assert all(w in str(e.value) for w in words), e.value


@pytest.mark.parametrize("window, min_history", [(1000, 100), (50, 20), (10, 100)])
def test_spike_score_against_pandas(window, min_history):
    x = np.random.default_rng(3).standard_t(2, 3000)
    s, least = pd.Series(x), min(window, min_history)
    past = s.shift().rolling(window, min_periods=2)
    want = ((s - past.mean()).abs() >= 4 * past.std())[least:].mean()
    got = M.spike_score(x, window, 4, min_history=min_history)
    assert want > 0.001 and got == pytest.approx(want)


def test_spike_score_edges():
    assert M.spike_score(np.full(500, 2.3)) == 0
    assert math.isnan(M.spike_score([2.0] * 100))
    x = np.full(500, 2.3); x[300] = np.nan
    assert M.spike_score(x) == pytest.approx(1 / 400)
    x[300] = -5
    assert M.spike_score(x) == pytest.approx(1 / 400)
    assert M.spike_score(x, above_only=True) == 0
    x = np.r_[np.random.default_rng(0).normal(2, .1, 300), 1e9, [2.0] * 200, 3.5]
    assert M.spike_score(x, window=100) > 1 / 402  # a huge spike leaves no rounding
    for bad in (dict(window=1), dict(sigmas=0), dict(min_history=0)):
        with pytest.raises(ValueError, match=next(iter(bad))): M.spike_score(x, **bad)
    with pytest.raises(ValueError, match="empty"): M.spike_score([])


def test_perplexity_and_bits():
    assert M.perplexity(math.log(256)) == pytest.approx(256)
    assert M.perplexity(1e4) == math.inf
    assert M.perplexity([0, math.log(2)]).tolist() == pytest.approx([1, 2])
    assert M.bits_per_byte(math.log(256)) == pytest.approx(8)
    assert M.bits_per_byte(math.log(16), 4) == pytest.approx(1)


def test_bootstrap_against_scipy():
    x = np.random.default_rng(0).normal(2.5, 0.1, 60)
    for f in (np.mean, np.median):
        got = M.bootstrap_interval(x, f, resamples=9000)
        want = stats.bootstrap((x,), f, method="percentile", n_resamples=9000,
                               random_state=1).confidence_interval
        assert got == pytest.approx(tuple(want), abs=0.005)
    assert M.bootstrap_interval(x) == M.bootstrap_interval(x, seed=0)
    assert M.bootstrap_interval(x, np.mean) != M.bootstrap_interval(x, np.mean, seed=1)
    assert M.bootstrap_interval([2.5]) == (2.5, 2.5)
    with pytest.raises(ValueError, match="NaN or infinity"):
        M.bootstrap_interval([1, np.nan])


# --- LR50

RATES = np.array([0.003, 0.006, 0.012, 0.025, 0.05, 0.1])

def test_lr50_against_statsmodels_without_prior():
    sm = pytest.importorskip("statsmodels.api")
    k, n = np.array([0, 1, 4, 5, 9, 10]), 10
    x = sm.add_constant(np.log10(RATES))
    fit = sm.GLM(np.c_[k, n - k], x, family=sm.families.Binomial()).fit(tol=1e-12)
    logit = sm.Logit(np.concatenate([np.r_[np.ones(a), np.zeros(n - a)] for a in k]),
                     np.repeat(x, n, axis=0)).fit(disp=0)
    got = M.lr50(RATES, k, n, prior=math.inf)
    assert got.slope == pytest.approx(fit.params[1], rel=1e-6)
    assert got.slope == pytest.approx(logit.params[1], rel=1e-6)
    assert got.estimate == pytest.approx(10 ** (-fit.params[0] / fit.params[1]))
    weak = M.lr50(RATES, k, n)  # data that can speak hardly notice the prior
    assert weak.estimate == pytest.approx(got.estimate, rel=1e-3)
    assert 0.97 * got.slope < weak.slope < got.slope


def test_lr50_fit_is_the_optimum():
    "No neighbour of the fitted pair has a better penalised likelihood."
    x, n, prior = np.log10(RATES), np.full(6, 5.0), 50.0
    for k in ([0, 0, 0, 3, 5, 5], [0, 1, 0, 0, 5, 4],
              [0, 0, 0, 0, 0, 1], [5, 4, 1, 0, 0, 0]):
        k = np.array(k, float)
        (a,), (b,) = M.formulas._logistic_fit(x, k[None], n, prior)
        def value(a, b):
            z = a + b * (x - x.mean())
            return (k * z - n * np.logaddexp(0, z)).sum() - b * b / (2 * prior**2)
        best = value(a, b)
        for da, db in [(1e-3, 0), (-1e-3, 0), (0, 1e-3), (0, -1e-3)]:
            assert value(a + da, b + db) <= best


@pytest.mark.parametrize("edge", range(1, 6))
def test_lr50_separated_is_the_geometric_middle(edge):
    k = [0] * edge + [5] * (6 - edge)
    got = M.lr50(RATES, k, 5)
    assert got.kind == "fitted" and math.isfinite(got.slope)
    assert got.estimate == pytest.approx(math.sqrt(RATES[edge - 1] * RATES[edge]))
    assert RATES[edge - 1] <= got.low < got.estimate < got.high <= RATES[edge]
    assert math.log(got.high / got.low) > 0.9 * math.log(RATES[edge] / RATES[edge - 1])


def test_lr50_off_the_grid():
    never, always = M.lr50(RATES, [0] * 6, 5), M.lr50(RATES, [5] * 6, 5)
    assert (never.estimate, never.low, never.high) == (math.inf, .1, math.inf)
    assert (always.estimate, always.low, always.high) == (0, 0, .003)
    assert (never.kind, always.kind) == ("above_grid", "below_grid")
    rare = M.lr50(RATES, [0, 0, 0, 0, 0, 1], 5)
    assert rare.kind == "above_grid" and rare.high == math.inf
    falling = M.lr50(RATES, [3, 1, 0, 0, 0, 0], 5)
    assert falling.kind == "above_grid"
    assert M.lr50([0.1], [1], 5).kind == "above_grid"
    assert M.lr50([0.1], [4], 5).kind == "below_grid"


def test_lr50_does_not_hang_on_units_order_or_process():
    k = [0, 0, 1, 3, 5, 5]
    a, b = M.lr50(RATES, k, 5), M.lr50(RATES * 10, k, [5] * 6)
    assert b.estimate == pytest.approx(10 * a.estimate)
    assert b.high == pytest.approx(10 * a.high)
    c = M.lr50(RATES[::-1], k[::-1], 5)
    assert (a.estimate, a.low, a.high) == (c.estimate, c.low, c.high)
    assert a == M.lr50(RATES, k, 5)
    assert a != M.lr50(RATES, k, 5, seed=1)
    assert a.low < a.estimate < a.high


def test_lr50_covers_a_known_truth():
    rng, hits = np.random.default_rng(0), 0
    grid, true = np.geomspace(0.003, 1, 9), 0.05
    chance = 1 / (1 + np.exp(-12 * (np.log10(grid) - math.log10(true))))
    for _ in range(60):
        got = M.lr50(grid, rng.binomial(5, chance), 5, resamples=300)
        hits += got.low <= true <= got.high
    assert hits >= 52


@pytest.mark.parametrize("rates, k, n, words", [
    ([.1, 0], [1, 1], 5, ["rates", "0.0", "positive"]),
    ([.1, .2], [1], 5, ["rates has 2", "k has 1"]),
    ([.1, .1], [1, 2], 5, ["twice"]), ([.1, .2], [1, 6], 5, ["k=6", "at most n"]),
    ([], [], 5, ["empty"]), ([.1], [1], 0, ["n=0"]),
])
def test_lr50_refuses(rates, k, n, words):
    for f in (M.lr50, M.highest_stable_lr):
        with pytest.raises(ValueError) as e: f(rates, k, n)
        assert all(w in str(e.value) for w in words), e.value


def test_ratio_of_fitted():
    a, b = M.lr50(RATES, [0, 0, 0, 1, 4, 5], 5), M.lr50(RATES, [0, 1, 4, 5, 5, 5], 5)
    r = M.lr50_ratio(a, b)
    assert r.kind == "fitted" and r.estimate == pytest.approx(a.estimate / b.estimate)
    assert 1 < r.low < r.estimate < r.high
    back = M.lr50_ratio(b, a)
    assert back.low == pytest.approx(1 / r.high, rel=0.05)
    same = M.lr50_ratio(a, a)
    assert same.low < 0.95 and same.high > 1.05  # equal seeds must not cancel


def test_ratio_bounds():
    some = M.lr50(RATES, [0, 0, 1, 4, 5, 5], 5)
    never, always = M.lr50(RATES, [0] * 6, 5), M.lr50(RATES, [5] * 6, 5)
    up = M.lr50_ratio(never, some)
    assert up.kind == "at_least" and up.estimate == pytest.approx(.1 / some.estimate)
    assert up.high == math.inf and 1 < up.low < up.estimate
    down = M.lr50_ratio(some, never)
    assert down.kind == "at_most" and down.low == 0 and math.isfinite(down.high)
    assert M.lr50_ratio(some, always).kind == "at_least"
    assert M.lr50_ratio(never, always).estimate == pytest.approx(.1 / .003)
    unknown = M.lr50_ratio(never, never)
    assert unknown.kind == "unknown" and math.isnan(unknown.estimate)
    assert (unknown.low, unknown.high) == (0, math.inf)
    with pytest.raises(ValueError, match="a=0.1: must be an LR50"):
        M.lr50_ratio(0.1, some)


def test_highest_stable_lr():
    k = [0, 0, 1, 3, 5, 5]
    assert M.highest_stable_lr(RATES, k, 5) == 0.006
    assert M.highest_stable_lr(RATES, k, 5, max_fraction=0.5) == 0.012
    assert M.highest_stable_lr(RATES, [0] * 6, 5) == 0.1
    assert M.highest_stable_lr(RATES, [1] + [0] * 5, 5) == 0.0
    with pytest.raises(ValueError, match="max_fraction=1"):
        M.highest_stable_lr(RATES, k, 5, max_fraction=1)
