"""Figures: what they show, what they refuse, and that nothing lies on anything else."""
import io
import itertools
import math
import re
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

mpl = pytest.importorskip("matplotlib")
mpl.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

from stabbook import metrics, plots as P  # noqa: E402
from stabbook.paper import HIGHEST_LR  # noqa: E402

RATES = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0)


@pytest.fixture(autouse=True)
def clean():
    "Figures are closed, and no figure may warn."
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield
    plt.close("all")


@pytest.fixture
def runs():
    rng, rows = np.random.default_rng(0), []
    for i, m in enumerate(P.PALETTE):
        for rate in RATES:
            bad = rate > 0.02 * 1.7**i
            for seed, x in enumerate(rng.normal(3.2 if bad else 2.4, 0.03, 4)):
                rows.append(dict(method=m, learning_rate=rate, seed=seed, diverged=bad,
                                 final_loss=x, initial_loss=5.5, error=""))
    return pd.DataFrame(rows)


def texts(fig):
    "Every drawn piece of text and its box in pixels, without the arrows of notes."
    fig.canvas.draw()
    off = set()  # labels of ticks beyond the ends of an axis exist, but are not drawn
    for axis in [a for ax in fig.axes for a in (ax.xaxis, ax.yaxis)]:
        low, high = sorted(axis.get_view_interval())
        off |= {t.label1 for t in axis.get_major_ticks() + axis.get_minor_ticks()
                if not low <= t.get_loc() <= high}
    found = [t for t in fig.findobj(mpl.text.Text) if t.get_visible() and t not in off]
    extent = mpl.text.Text.get_window_extent
    return [(t.get_text(), extent(t)) for t in found if t.get_text().strip()]


def check_layout(fig):
    "No text on text, and none outside the picture."
    box = fig.bbox.padded(1)
    inside = texts(fig)
    assert len(inside) > 3
    for (s, a), (t, b) in itertools.combinations(inside, 2):
        over = min(a.x1, b.x1) - max(a.x0, b.x0), min(a.y1, b.y1) - max(a.y0, b.y0)
        assert min(over) <= 2, f"{s!r} lies on {t!r}"
    for s, b in inside:
        assert b.x0 >= box.x0 and b.x1 <= box.x1, f"{s!r} is cut off at the side"
        assert b.y0 >= box.y0 and b.y1 <= box.y1, f"{s!r} is cut off above or below"


# --- without matplotlib

def test_module_needs_no_matplotlib_and_the_error_names_the_extra():
    code = ("import sys; sys.modules['matplotlib'] = None\n"
            "import stabbook.plots as p\n"
            "try: p.style()\nexcept ImportError as e: print(e)")
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert 'pip install "stabbook[plots]"' in out.stdout, out.stderr


# --- looks

def test_looks_are_distinct_and_stable():
    colors, markers, _ = zip(*P.PALETTE.values())
    assert len(set(colors)) == len(set(markers)) == len(P.PALETTE) == 10
    assert P.look("bf16_baseline") == P.look("baseline")
    assert P.look("mine") == P.look("mine")
    assert P.look("mine")["color"] not in colors


def test_palette_is_that_of_the_css():
    css = Path(__file__).parents[1] / "book" / "_static" / "custom.css"
    if not css.exists(): pytest.skip("the package is tested without its book")
    found = dict(
        re.findall(r"--method-([a-z-]+):\s*(#[0-9A-Fa-f]{6})", css.read_text())
    )
    want = {m.replace("_", "-"): c for m, (c, _, _) in P.PALETTE.items()}
    assert {k: v.upper() for k, v in found.items()} == want


def test_every_method_has_a_look():
    methods = pytest.importorskip("stabbook.methods")
    assert set(methods.METHODS) <= set(P.PALETTE)


def test_style_is_restored_and_can_be_set():
    before = dict(mpl.rcParams)
    with P.style(): assert mpl.rcParams["axes.spines.top"] is False
    assert dict(mpl.rcParams) == before
    s = P.style()
    assert mpl.rcParams["figure.dpi"] == 200
    s.__exit__()
    assert dict(mpl.rcParams) == before


def test_spread_keeps_order_and_gap_and_moves_least():
    y = np.random.default_rng(0).uniform(size=30)
    out = P.spread(y, 0.05)
    order = np.argsort(y)
    assert np.diff(out[order]).min() >= 0.05 - 1e-12
    assert out.mean() == pytest.approx(y.mean())
    assert P.spread([0.0, 1.0], 0.5).tolist() == [0, 1]


# --- the figures

def figures(runs):
    few = ["baseline", "soft_cap", "qk_norm", "qk_norm_cap"]
    rng = np.random.default_rng(1)
    keys = pd.DataFrame([dict(key=f"{m}{s}", method=m) for m in few for s in range(3)])
    curves = {k: np.exp(rng.normal(0.01, 0.02, 50).cumsum()) for k in keys.key}
    yield "loss", P.loss_vs_lr(runs, methods=few).figure
    yield "loss of ten", P.loss_vs_lr(runs).figure
    yield "panels", P.loss_panels(runs)
    yield "curves", P.curves_band(curves, "max_attention_logit", runs=keys,
                                  log_y=True).figure
    yield "divergence", P.divergence_curve(runs, methods=few).figure
    yield "divergence of ten", P.divergence_curve(runs).figure
    yield "map of ten", P.divergence_map(runs).figure
    yield "ranking", P.ranking(runs).figure
    yield "ratios", P.ranking(runs, ratio_to="baseline").figure
    yield "paper", P.paper_vs_ours(runs)


def test_layout_and_ground_of_every_figure(runs):
    for name, fig in figures(runs):
        try: check_layout(fig)
        except AssertionError as e: raise AssertionError(f"{name}: {e}") from None
        assert fig.get_facecolor() == (1, 1, 1, 1), name
        small = min(
            t.get_fontsize() for t in fig.findobj(mpl.text.Text) if t.get_text()
        )
        pixels = small / 72 / fig.get_figwidth() * 343  # at the width of a phone
        assert pixels > 7, (name, small)


def test_png_is_opaque_white_and_two_pixels_to_the_point(runs):
    out = io.BytesIO()
    fig = P.loss_vs_lr(runs).figure
    fig.savefig(out, format="png")
    out.seek(0)
    image = plt.imread(out)
    assert image.shape[1] == 1200 and (image[..., 3:] == 1).all()
    assert (image[0, 0, :3] == 1).all() and (image[-1, -1, :3] == 1).all()


def test_drawing_leaves_no_style_behind(runs):
    before = dict(mpl.rcParams)
    for _ in figures(runs): pass
    assert dict(mpl.rcParams) == before


def test_functions_draw_into_given_axes(runs):
    fig, axes = plt.subplots(1, 3)
    assert P.loss_vs_lr(runs, methods=["qk_norm"], ax=axes[0]) is axes[0]
    assert P.divergence_curve(runs, methods=["qk_norm"], ax=axes[1]) is axes[1]
    assert P.ranking(runs, ax=axes[2]) is axes[2]


def lines(ax, marker):
    return [l for l in ax.lines if l.get_marker() == marker]


def test_loss_is_cut_at_the_initial_loss_and_marks_are_hollow(runs):
    one = runs[runs.method == "qk_norm"].copy()
    one.loc[one.learning_rate == 1.0, "final_loss"] = [200, np.nan, np.inf, 7.0]
    ax = P.loss_vs_lr(one)
    filled, hollow = lines(ax, "D")
    assert hollow.get_markerfacecolor() == "white"
    assert max(hollow.get_ydata()) == 5.5
    want = one[~one.diverged].learning_rate.unique()
    assert filled.get_xdata().tolist() == want.tolist()
    assert ax.get_ylim()[1] < 6
    higher = P.loss_vs_lr(one, ceiling=8)
    assert max(lines(higher, "D")[1].get_ydata()) == pytest.approx(8)


def test_median_and_band_are_those_of_the_runs(runs):
    one = runs[runs.method == "baseline"]
    ax = P.loss_vs_lr(one)
    want = one.groupby("learning_rate").final_loss.median()
    assert ax.lines[0].get_ydata() == pytest.approx(want.to_numpy())
    band = ax.collections[0].get_paths()[0].vertices[:, 1]
    assert band.max() == pytest.approx(one.final_loss.max())


def test_runs_with_an_error_are_left_out(runs):
    one = runs[runs.method == "baseline"].copy()
    one.loc[one.seed == 3, ["error", "final_loss"]] = ["out of memory", np.nan]
    ax = P.loss_vs_lr(one)
    want = one[one.seed < 3].groupby("learning_rate").final_loss.median()
    assert ax.lines[0].get_ydata() == pytest.approx(want.to_numpy())
    broken = one.assign(error="out of memory")
    with pytest.raises(ValueError, match="runs is empty"): P.loss_vs_lr(broken)


def test_divergence_shows_the_counts_and_the_fit(runs):
    ax = P.divergence_curve(runs, methods=["qk_norm"])
    (points,) = lines(ax, "D")
    want = runs[runs.method == "qk_norm"].groupby("learning_rate").diverged.mean()
    assert points.get_ydata() == pytest.approx(want.to_numpy())
    half = metrics.lr50_by(runs)["qk_norm"]
    assert any(list(l.get_xdata()) == [half.estimate] * 2 for l in ax.lines)


def test_ranking_is_sorted_and_shows_bounds(runs):
    runs.loc[runs.method == "qkv_norm", "diverged"] = False
    runs.loc[runs.method == "soft_clip", "diverged"] = True
    ax = P.ranking(runs)
    names = [t.get_text() for t in ax.get_yticklabels()]
    assert names[0] == "clipped softmax" and set(names[-2:]) == {
        "QKV-norm",
        "QK-norm + cap",
    }
    shown = " ".join(t.get_text() for t in ax.texts)
    assert "> 1" in shown and "< 0.003" in shown and "inf" not in shown
    ratio = P.ranking(runs, ratio_to="qkv_norm")
    assert "qkv_norm" not in [t.get_text() for t in ratio.get_yticklabels()]
    assert not re.search("inf|nan", " ".join(t.get_text() for t in ratio.texts))


def test_paper_and_ours_stand_in_two_columns(runs):
    fig = P.paper_vs_ours(runs)
    left, right = fig.axes
    assert (left.get_title("left"), right.get_title("left")) == (
        "the paper",
        "this book",
    )
    said = {t.get_text() for t in left.texts}
    assert said == {"1×", "1.3×", "3.3×", "6.7×", "10×"}
    ours = metrics.highest_stable_lr(RATES, [4 * (r > .02 * 1.7**6) for r in RATES], 4)
    base = metrics.highest_stable_lr(RATES, [4 * (r > .02) for r in RATES], 4)
    assert f"{ours / base:.2g}×" in {t.get_text() for t in right.texts}
    assert left.get_xlim() == right.get_xlim()
    never = P.paper_vs_ours(runs.assign(diverged=False))
    assert any(t.get_text().startswith("≥") for t in never.axes[1].texts)


def test_curves_from_dictionary_and_tables_agree():
    rng = np.random.default_rng(0)
    keys = pd.DataFrame([dict(key=f"{m}{s}", method=m, seed=s)
                         for m in ("baseline", "qk_norm") for s in range(5)])
    curves = {k: rng.normal(3, 1, 40) for k in keys.key}
    wide = keys.assign(loss=[curves[k] for k in keys.key])
    long = wide.explode("loss").astype({"loss": float})
    long["step"] = long.groupby(["method", "seed"]).cumcount()
    axes = [P.curves_band(curves, "loss", runs=keys), P.curves_band(wide, "loss"),
            P.curves_band(long, "loss")]
    want = np.median([curves[f"baseline{s}"] for s in range(5)], axis=0)
    for ax in axes: assert ax.lines[0].get_ydata() == pytest.approx(want)
    assert axes[0].lines[0].get_xdata()[0] == 1


def test_curves_of_runs_that_ended_early():
    keys = pd.DataFrame(dict(key=["a", "b"], method="baseline"))
    curves = {"a": np.arange(1.0, 11), "b": np.array([1.0, 3.0, np.nan])}
    ax = P.curves_band(curves, "loss", runs=keys, log_y=True, smooth=1)
    assert ax.lines[0].get_ydata()[:4] == pytest.approx([1, 2.5, 3, 4])


def test_smoothing_is_a_running_mean():
    c = np.random.default_rng(0).normal(size=(2, 30))
    want = pd.DataFrame(c.T).rolling(7, min_periods=1).mean().to_numpy().T
    assert P._smooth(c, 7) == pytest.approx(want)


def test_bad_input_is_named(runs):
    with pytest.raises(ValueError, match="no column 'failed'"):
        P.loss_vs_lr(runs.drop(columns="diverged"))
    with pytest.raises(ValueError, match="did you mean 'qk_norm'"):
        P.ranking(runs, methods=["qk_nrom"])
    with pytest.raises(ValueError, match="band='all': must be"):
        P.loss_vs_lr(runs, band="all")
    with pytest.raises(ValueError, match="runs= must be a table"):
        P.curves_band({"a": [1.0]}, "loss")
    with pytest.raises(ValueError, match="no run in common"):
        P.curves_band(
            {"a": [1.0]}, "loss", runs=pd.DataFrame(dict(key=["b"], method="x"))
        )
    with pytest.raises(ValueError, match="runs is empty"):
        P.ranking(runs.iloc[:0])
    assert math.isclose(HIGHEST_LR["qkv_norm"] / HIGHEST_LR["qk_norm"], 1.5)
