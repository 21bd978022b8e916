"The rules of the ledger on runs whose answer is known, and its sentences."

import json
from pathlib import Path

import pandas as pd
import pytest

PAGE = Path(__file__).parent.parent / "nbs" / "ledger.ipynb"


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    "All names of the page, run where there are no results: every rule, no verdicts."
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STABBOOK_RESULTS", str(tmp_path_factory.mktemp("none")))
        names = {}
        for c in json.loads(PAGE.read_text("utf-8"))["cells"]:
            if c["cell_type"] == "code":
                exec(compile("".join(c["source"]), str(PAGE), "exec"), names)
    return names


def arms(lost, logit):
    "Runs of `cause`: arm -> how many of five are lost at 0.036, and its largest logit."
    rows = [dict(method=m, learning_rate=rate, seed=s, max_attention_logit=logit[m],
                 failed=rate == 0.036 and s < k)
            for m, k in lost.items() for rate in (0.007, 0.036) for s in range(5)]
    return pd.DataFrame(rows)


LOGIT = {"baseline": 9000.0, "qk_norm": 30.0, "softcap 5": 9000.0, "softcap 50": 9000.0,
         "QK-clip 10": 20.0}


@pytest.mark.parametrize("clip, cap, word", [
    (0, 0, "reproduced"), (5, 5, "contradicted"), (0, 5, "inconclusive")])
def test_the_cause_is_judged_by_the_committed_rule(page, clip, cap, word):
    lost = {"baseline": 5, "qk_norm": 0, "softcap 5": cap, "softcap 50": 5,
            "QK-clip 10": clip}
    found, text = page["cause_by"](arms(lost, LOGIT), "failed")
    assert found == word
    # A cap of 50 that is saturated shows the softmax 50, which is not below 50
    assert "softcap 50" not in text and ("2 arms" in text)
    assert ("softcap 5" in text) == (cap == 5)


def test_where_the_baseline_loses_nothing_the_cause_cannot_be_judged(page):
    found, _ = page["cause_by"](arms(dict.fromkeys(LOGIT, 0), LOGIT), "failed")
    assert found == "not testable here"


@pytest.mark.parametrize("k, words", [(12, "fits"), (60, "does not fit")])
def test_the_articles_count_fits_or_does_not(page, k, words):
    rows = [dict(method="baseline", learning_rate=r, seed=s, failed=s < k)
            for r in (0.01, 0.015) for s in range(100)]
    text = page["article_count"](pd.DataFrame(rows), "baseline", 0, "failed")
    assert text == f"; the article's 12 of 100 {words}"


@pytest.mark.parametrize("criterion, pairs", [("failed", 10), ("behind", 6)])
def test_a_pair_counts_if_both_held_under_the_criterion(page, criterion, pairs):
    rows = [dict(method=m, learning_rate=r, seed=s, failed=False,
                 behind=(m == "baseline") and s < 4,
                 val_loss=2.5 + 0.01 * s - 0.1 * (m == "qk_norm") * (1 + s % 2))
            for m in ("baseline", "qk_norm") for r in (0.01, 0.015) for s in range(10)]
    (_, high), text = page["kept"](
        pd.DataFrame(rows), ("qk_norm", 0), ("baseline", 0), criterion)
    assert high < 0 and text.endswith(f", {pairs} pairs")


def test_a_claim_without_runs_is_open_and_one_without_training_is_not(page):
    found = {c.name: verdict for c, verdict, *_ in page["JUDGED"]}
    assert found["P10"] == found["P2"] == found["T5"] == found["P18"] == "open"
    assert found["E20"] == "too strong" and found["P7"] == "not testable here"


def test_every_verdict_is_explained_on_the_page(page):
    text = PAGE.read_text("utf-8")
    for word in page["VERDICTS"]: assert f"| {word} | " in text
    assert "not reproduced" not in text and "not settled" not in text
