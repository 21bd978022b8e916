"""The command: exit codes, messages on stderr, light imports."""
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from stabbook import cli, store

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))
TINY = ["--corpus", "markov:1,4,0,20000", "--steps", "3", "--set", "hidden_size=16",
        "--set", "num_hidden_layers=1", "--set", "sequence_length=16"]
SWEEP = """
experiment = "mine"
[base]
corpus = "markov:1,4,0,20000"
steps = 3
sequence_length = 16
warmup_steps = 1
[base.model]
hidden_size = 16
num_hidden_layers = 1
[grid]
methods = ["baseline", "qk_norm"]
learning_rate = [0.01, 1]
seed = "0-1"
"""


@pytest.fixture
def call(tmp_path, monkeypatch):
    monkeypatch.setenv("STABBOOK_RESULTS", str(tmp_path / "results"))
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.delenv("STABBOOK_DEBUG", raising=False)
    return lambda *args: CliRunner().invoke(cli.app, [str(a) for a in args])


def test_import_is_light():
    code = ("import sys, stabbook.cli; print([m for m in ('torch', 'pandas', 'numpy', "
            "'scipy', 'pyarrow') if m in sys.modules])")
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True,
                         cwd=ROOT)
    assert out.stdout.strip() == "[]", out.stderr


def test_help_and_version_say_what_there_is(call):
    top = call("--help")
    assert top.exit_code == 0
    for name in "run", "sweep", "verify", "doctor", "--version": assert name in top.output
    for name in "run", "sweep", "verify", "doctor":
        assert call(name, "-h").exit_code == 0
    text = " ".join(call("sweep", "-h").output.replace("│", " ").split())
    assert "--dry-run" in text and "a run that hangs is not ended" in text
    assert call("--version").output.strip() == "stabbook 0.1.0"


def test_run_prints_a_table_and_saves_on_demand(call, tmp_path):
    out = call("run", "--method", "qk_norm", "--lr", "0.02", *TINY, "--save", "mine")
    assert out.exit_code == 0, out.output
    assert "largest attention logit" in out.stdout and "0.02" in out.stdout
    df = store.load("mine", "smoke")
    assert (df.method[0], df.learning_rate[0], df.steps[0]) == ("qk_norm", 0.02, 3)
    assert df.key[0] in out.stdout
    call("run", *TINY)
    assert len(store.load("mine")) == 1


@pytest.mark.parametrize("args, words", [
    (["run", "--method", "qknorm"], "did you mean 'qk_norm'?"),
    (["run", "--set", "hiden_size=16"], "did you mean 'hidden_size'?"),
    (["run", "--set", "hidden_size"], "must be NAME=VALUE"),
    (["run", "--set", "hidden_size=17"], "17"),
    (["run", "--corpus", "wkii"], "did you mean 'wiki'?"),
    (["run", "--save", "x", "--scale", "smoek"], "did you mean 'smoke'?"),
    (["run", "--steps", "many"], "integer"),
    (["run", "--stepps", "3"], "--steps"),
    (["sweep", "nothing.toml"], "no such file"),
    (["sweep", "x.toml", "--scale", "cpuu"], "did you mean 'cpu'?"),
    (["sweep", "x.toml", "--workers", "-1"], "equal to 0"),
    (["dcotor"], "doctor")])
def test_mistakes_end_with_code_2_and_the_right_names_on_stderr(call, args, words):
    out = call(*args)
    assert out.exit_code == 2, out.output
    assert words in " ".join(out.stderr.split()) and out.stdout == ""
    assert "Traceback" not in out.output


def test_sweep_from_a_file(call, tmp_path):
    (tmp_path / "mine.toml").write_text(SWEEP)
    plan = call("sweep", tmp_path / "mine.toml", "--dry-run")
    assert plan.exit_code == 0 and "8 to train, 0 stored" in plan.stdout
    assert store.experiments() == []
    done = call("sweep", tmp_path / "mine.toml", "--workers", "0", "--quiet")
    assert done.exit_code == 0, done.output
    assert "mine smoke: 8 trained, 0 reused, 0 failed" in done.stdout
    again = call("sweep", tmp_path / "mine.toml", "--workers", "0")
    assert "0 trained, 8 reused, 0 failed" in again.stdout
    df = store.load("mine")
    assert set(df.learning_rate) == {0.01, 1.0} and set(df.seed) == {0, 1}


@pytest.mark.parametrize("text, words", [
    ("[grid]\nlearning_rat = [1]", "did you mean 'learning_rate'?"),
    ("[grid]\nmethods = ['qknorm']", "did you mean 'qk_norm'?"),
    ("exprmnt = 'x'", "did you mean 'experiment'?"),
    ("[base.model]\nhidden_sizes = 3", "did you mean 'hidden_size'?"),
    ("[base", "is not valid TOML"),
    ("scale = 'tiny'\n[grid]\nseed = 1", "smoke, cpu, gpu"),
    ("experiment = 3", "experiment=3 must be a text"),
    ("experiment = 'a b'", "letters, digits"),
    ("time_limit = '10'", "time_limit='10' must be a number of seconds"),
    ("grid = 3", "grid=3 must be a table"), ("[[grid]]\nseed = 1", "must be a table"),
    ("[base]\nmodel = 3", "[base.model]"),
    ("[base]\nmethods = ['qk_norm']", "methods belongs under [grid]"),
    ("[grid]\nmethods = 3", "methods=3 must be a name or a list of names"),
    ("[grid]\nmethod = 'baseline'\nmethods = ['qk_norm']", "keep one"),
    ("[grid]\nseed = []", "seed=[] holds no value"),
    ("[grid]\nseed = '0..9'", "a range written as '0-9'"),
    ("[grid]\nseed = '9-0'", "the smaller number first"),
    ("[grid]\nlearning_rate = '0.1'", "learning_rate='0.1' must be a finite number"),
    ("[grid.model]\nhiden_size = [8]", "did you mean 'hidden_size'?"),
    ("[grid]\nmethods = [['qk_norm']]", "method ['qk_norm'] must be a name"),
    ("[grid]\nseed = '0-99999999999'", "has more than 1,000,000 values: give fewer"),
    ("[grid]\nseed = '0-99999999999999999999'", "has more than 1,000,000 values"),
    ("[grid]\nseed = '1-2000'\nlearning_rate = 0.1\nsteps = '1-2000'",
     "a grid of 4,000,000 runs: 1,000,000 are allowed"),
    (f"[grid]\nhidden_size = [{10**21}]", "must be from -2**63 to 2**63 - 1"),
    (f"[grid]\nseed = [1, {10**20}]", "seed=100000000000000000000 must be from -2**63"),
    (f"[base.model]\nhidden_size = {2**62}\nnorm_bias = true", ""),
    ("[base]\ncorpus = 'wkii'", "did you mean 'wiki'?"),
    ("[base]\ncorpus = 'markov:0'", "order must be 1 or more"),
    ("time_limit = inf", "time_limit=inf must be above 0 and at most 1e9"),
    ("time_limit = -1", "time_limit=-1 must be above 0"),
    ("[grid]\n'model.hidden_size' = [16]\n[grid.model]\nhidden_size = [32]",
     "model.hidden_size is given twice"),
    ("[base]\n'model.hidden_size' = 16\n[base.model]\nhidden_size = 32", "given twice"),
    ("[grid]\nhidden_size = [16]\n[grid.model]\nhidden_size = [32]", "given twice")])
def test_mistakes_in_a_file_are_named(call, tmp_path, text, words):
    (tmp_path / "bad.toml").write_text(text)
    out = call("sweep", tmp_path / "bad.toml", "--dry-run")
    assert out.exit_code == 2 and words in out.stderr, out.output
    assert out.stderr.startswith(f"error: {tmp_path / 'bad.toml'}"), out.stderr
    assert len(out.stderr.splitlines()) == 1 and "[Errno" not in out.stderr


def test_a_file_that_is_a_folder_or_closed_is_named(call, tmp_path, monkeypatch):
    (tmp_path / "bad.toml").mkdir()
    out = call("sweep", tmp_path / "bad.toml")
    assert out.exit_code == 2 and "bad.toml cannot be read (Is a directory)" in out.stderr

    def denied(*_, **__): raise PermissionError(13, "Permission denied")
    monkeypatch.setattr(Path, "read_text", denied)
    out = call("sweep", tmp_path / "bad.toml")
    assert out.exit_code == 2 and "bad.toml cannot be read (Permission" in out.stderr


def test_advice_of_verify_for_a_sweep_of_ones_own_can_be_followed(call, tmp_path):
    (tmp_path / "mine.toml").write_text(SWEEP)
    call("sweep", tmp_path / "mine.toml", "--workers", "0", "--quiet")
    out = call("verify", "mine")
    assert out.exit_code == 1 and "but at smoke" in out.stderr
    assert "stabbook sweep mine" not in out.stderr


def test_failed_runs_make_the_sweep_end_with_code_1(call, tmp_path, monkeypatch):
    from stabbook import train
    (tmp_path / "mine.toml").write_text(SWEEP)

    def broken(run, **limits): raise RuntimeError("out of luck")
    monkeypatch.setattr(train, "train", broken)
    out = call("sweep", tmp_path / "mine.toml", "--workers", "0", "--quiet")
    assert out.exit_code == 1 and "8 failed" in out.stdout
    assert out.stderr.count("out of luck") == 8


def test_stored_failures_are_counted_and_end_the_sweep_with_code_1(call, tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text(SWEEP)
    args = "sweep", file, "--workers", "0", "--quiet"
    assert call(*args, "--time-limit", "1e-9").exit_code == 1
    again = call(*args)
    assert again.exit_code == 1 and ("8 reused, of which 8 with an error (--retry-failed "
                                     "trains them again), 0 failed") in again.stdout
    plan = call("sweep", file, "--dry-run")
    assert plan.exit_code == 0 and "8 stored, of which 8 with an error" in plan.stdout
    mended = call(*args, "--retry-failed")
    assert mended.exit_code == 0 and "8 trained, 0 reused, 0 failed" in mended.stdout
    last = call(*args)
    assert last.exit_code == 0 and "8 reused, 0 failed" in last.stdout


def test_experiment_of_the_book(call, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "no such file: learning_rate" in call("sweep", "learning_rate").stderr
    (tmp_path / "nbs" / "experiments").mkdir(parents=True)
    (tmp_path / "nbs" / "experiments" / "learning_rate.ipynb").touch()
    (tmp_path / "Makefile").write_text(
        "reproduce:\n\t@echo $(EXPERIMENT) $(SCALE) $(WORKERS) > said; exit 0\n")
    plan = call("sweep", "learning_rate", "--dry-run")
    assert "make reproduce EXPERIMENT=learning_rate SCALE=smoke" in plan.stdout
    out = call("sweep", "learning_rate", "--scale", "cpu", "--workers", "2")
    assert out.exit_code == 0
    assert (tmp_path / "said").read_text() == "learning_rate cpu 2\n"
    assert "did you mean 'learning_rate'?" in call("sweep", "lerning_rate").stderr
    for option in ["--quiet"], ["--time-limit", "3"]:
        out = call("sweep", "learning_rate", *option)
        assert out.exit_code == 2 and "need a .toml file" in out.stderr


def test_failed_runs_of_an_experiment_are_tried_again_on_demand(call, tmp_path, monkeypatch):
    from test_store import record
    for seed, error in enumerate(["", "MemoryError", "hung"]):
        store.save(record(seed=seed, error=error), "growth", "cpu")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nbs" / "experiments").mkdir(parents=True)
    (tmp_path / "nbs" / "experiments" / "growth.ipynb").touch()
    (tmp_path / "Makefile").write_text("reproduce:\n\t@exit 0\n")
    call("sweep", "growth", "--scale", "cpu", "--retry-failed", "--dry-run")
    out = call("sweep", "growth", "--scale", "cpu")
    assert out.exit_code == 1
    assert "2 of 3 runs of growth at scale cpu are stored with an error (--retry" in out.stderr
    assert len(store.keys("growth", "cpu")) == 3, "only when asked, and not in a dry run"
    out = call("sweep", "growth", "--scale", "cpu", "--retry-failed")
    assert out.exit_code == 0 and "2 failed runs will be trained again" in out.stderr
    assert store.load("growth", "cpu").error.tolist() == [""]


def test_doctor(call, tmp_path, monkeypatch):
    out = call("doctor")
    assert out.exit_code == 0
    for words in ("torch", "GFLOP/s", "corpus wiki", "extra plots", "nothing stored"):
        assert words in out.stdout
    (tmp_path / "file").touch()
    monkeypatch.setenv("STABBOOK_RESULTS", str(tmp_path / "file"))
    out = call("doctor")
    assert out.exit_code == 1 and "results" in out.stderr


def test_doctor_says_what_to_do_about_what_is_missing(call, monkeypatch):
    import importlib.util
    from stabbook import data
    real = importlib.util.find_spec
    fake = lambda name, *a: None if name in ("gensim", "seaborn") else real(name, *a)
    monkeypatch.setattr(importlib.util, "find_spec", fake)
    monkeypatch.setattr(data, "find_spec", fake)
    monkeypatch.setenv("PATH", "")
    data._load.cache_clear()
    out = call("doctor")
    assert out.exit_code == 0
    for words in ("stabbook[plots]", "stabbook[book]", "no g++"):
        assert words in out.stdout


def test_debug_shows_the_traceback(tmp_path):
    code = "from stabbook.cli import app; app(['run', '--method', 'qknorm'])"
    env = dict(os.environ, STABBOOK_RESULTS=str(tmp_path))
    quiet, loud = (subprocess.run([sys.executable, "-c", code], text=True, cwd=ROOT,
                                  capture_output=True, env=dict(env, **extra))
                   for extra in ({}, {"STABBOOK_DEBUG": "1"}))
    assert quiet.returncode == 2 and "Traceback" not in quiet.stderr
    assert "Traceback" in loud.stderr and loud.returncode != 0


def test_damaged_store_is_said_with_code_1(call, tmp_path):
    (tmp_path / "mine.toml").write_text(SWEEP)
    call("sweep", tmp_path / "mine.toml", "--workers", "0", "--quiet")
    path = store.sources("mine", "smoke")[0]
    path.write_bytes(b"PAR1")
    out = call("sweep", tmp_path / "mine.toml", "--workers", "0", "--quiet")
    assert out.exit_code == 1 and path.name in out.stderr and "delete it" in out.stderr


def test_ctrl_c_ends_with_130(call, tmp_path, monkeypatch):
    from stabbook import sweep
    (tmp_path / "mine.toml").write_text(SWEEP)

    def interrupted(*args, **kwargs): raise KeyboardInterrupt
    monkeypatch.setattr(sweep, "sweep", interrupted)
    assert call("sweep", tmp_path / "mine.toml").exit_code == 130
