"""Progress: a bar on a terminal, lines in a log, nothing where there is no stderr."""
import io
import re
import sys

import pytest
from sweeps import go, jobs, start

pytest_plugins = "sweeps"


def test_stored_failures_are_counted_wherever_reused_runs_are(
        results, capsys, monkeypatch):
    go(jobs(3, n1="raise"))
    again = go(jobs(5, all="sleep 0.6"), progress=True, every=0.5)
    assert (again.reused, again.reused_failed, again.failed) == (3, 1, 0)
    assert "3 reused, of which 1 with an error (--retry-failed trains" in repr(again)
    assert " done (3 reused (1 with an error), 0 failed)" in capsys.readouterr().err
    assert go(jobs(5), dry_run=True).reused_failed == 1

    class Terminal(io.StringIO):
        def isatty(self): return True
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    go(jobs(6, all="sleep 0.6"), progress=True)
    assert "reused=5, with_error=1, failed=0" in screen.getvalue()
    mended = go(jobs(5), retry_failed=True)
    assert (mended.trained, mended.reused, mended.reused_failed) == (1, 4, 0)


def test_progress_in_a_log_is_lines_and_failures_one_line_each(results, capsys):
    go(jobs(30, all="sleep 0.1", n3="raise"), progress=True, every=1.0)
    lines = capsys.readouterr().err.splitlines()
    assert "\r" not in "".join(lines)
    states = [ln for ln in lines if " done (" in ln]
    assert 2 <= len(states) <= 6 and states[-1].startswith("exp smoke: 30 of 30 done")
    failed = [ln for ln in lines if "failed: " in ln]
    assert len(failed) == 1 and "seed=3 failed: RuntimeError" in failed[0]
    go(jobs(30), progress=True)
    assert capsys.readouterr().err == ""


def test_progress_through_a_pipe_is_a_line_now_and_then(results):
    p = start(12, "sleep 0.25", 0, 1.0)
    err = p.communicate(timeout=120)[1]
    lines = [ln for ln in err.splitlines() if " done (" in ln]
    assert 2 <= len(lines) <= 12 and "\r" not in err and "%|" not in err
    assert re.fullmatch(r"exp smoke: \d+ of 12 done \(0 reused, 0 failed\), \d+ s left",
                        lines[0]), lines[0]


def test_progress_on_a_terminal_is_a_bar(results, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self): return True
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    go(jobs(2)), go(jobs(5, all="sleep 0.4", n4="raise"), progress=True)
    bar = screen.getvalue()
    assert "exp smoke: " in bar and "5/5" in bar and "\r" in bar
    assert "reused=2" in bar and "failed=1" in bar
    assert re.search(r"\d/5 \[\d\d:\d\d<", bar), "time passed and left"
    assert len(re.findall(r"seed=4 failed: RuntimeError: a run that raises", bar)) == 1


@pytest.mark.parametrize("workers", [0, 2])
def test_without_a_stderr_nothing_is_shown_and_all_is_trained(
        results, monkeypatch, workers):
    "F31: a program without a window has none"
    monkeypatch.setattr(sys, "stderr", None)
    summary = go(jobs(3, n1="raise"), progress=True, every=0.0, workers=workers)
    assert (summary.trained, summary.failed) == (2, 1)


def test_an_interrupted_sweep_without_a_stderr_is_silent(results, monkeypatch, capsys):
    def stop(run, **_): raise KeyboardInterrupt
    monkeypatch.setattr(sys, "stderr", None)
    with pytest.raises(KeyboardInterrupt): go(jobs(2), trainer=stop, progress=True)
    assert capsys.readouterr().out == ""
