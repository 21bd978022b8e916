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
    for name in "run", "sweep", "verify", "doctor", "--version":
        assert name in top.output
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
    ("scale = 'tiny'\n[grid]\nseed = 1", "'smoke', 'cpu', 'gpu'"),
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
    assert (
        out.exit_code == 2 and "bad.toml cannot be read (Is a directory)" in out.stderr
    )

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
    assert (
        again.exit_code == 1
        and (
            "8 reused, of which 8 with an error (--retry-failed "
            "trains them again), 0 failed"
        )
        in again.stdout
    )
    plan = call("sweep", file, "--dry-run")
    assert plan.exit_code == 0 and "8 stored, of which 8 with an error" in plan.stdout
    mended = call(*args, "--retry-failed")
    assert mended.exit_code == 0 and "8 trained, 0 reused, 0 failed" in mended.stdout
    last = call(*args)
    assert last.exit_code == 0 and "8 reused, 0 failed" in last.stdout


def test_an_experiment_of_the_book_is_left_to_its_page(call, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    out = call("sweep", "learning_rate")
    assert out.exit_code == 2 and "no such file: learning_rate" in out.stderr
    assert "make reproduce EXPERIMENT=learning_rate" in out.stderr
    (tmp_path / "folder").mkdir()
    assert "folder cannot be read (Is a directory)" in call("sweep", "folder").stderr


def test_pack_puts_the_runs_into_tables(call, tmp_path):
    (tmp_path / "mine.toml").write_text(SWEEP)
    call("sweep", tmp_path / "mine.toml", "--workers", "0", "--quiet")
    before = store.load("mine")
    out = call("pack", "mine", "--scale", "smoke")
    assert out.exit_code == 0 and "8 runs of mine are in" in out.stdout
    assert (store.folder("mine", "smoke") / "runs.parquet").exists()
    assert store.load("mine").equals(before)
    assert call("pack", "mien", "--scale", "smoke").exit_code == 1


# ------------------------------------------------- nothing that was trained is lost

def cli_process(*args, cwd, **environ):
    env = {k: v for k, v in os.environ.items() if k not in ("STABBOOK_RESULTS",)}
    env |= {
        "PYTHONPATH": str(ROOT),
        "STABBOOK_RESULTS": str(cwd / "results"),
        **environ,
    }
    return subprocess.run([sys.executable, "-m", "stabbook.cli", *args], env=env,
                          cwd=cwd, capture_output=True)


@pytest.mark.parametrize("coding", ["ascii", "cp1252", "latin-1"])
def test_a_run_is_stored_and_shown_whatever_the_terminal_can_write(tmp_path, coding):
    out = cli_process(
        "run", *TINY, "--save", "x", cwd=tmp_path, PYTHONIOENCODING=coding
    )
    assert out.returncode == 0, out.stderr
    assert b"loss, step by step" in out.stdout and b"stored as" in out.stdout
    assert len(store.keys("x", "smoke", tmp_path / "results")) == 1


def test_a_run_is_stored_when_its_reader_has_left(tmp_path):
    env = {**os.environ, "PYTHONPATH": str(ROOT), "STABBOOK_RESULTS": str(tmp_path)}
    child = subprocess.Popen(
        [sys.executable, "-m", "stabbook.cli", "run", *TINY, "--save", "x"],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    child.stdout.close()
    err = child.stderr.read()
    child.wait()
    assert len(store.keys("x", "smoke", tmp_path)) == 1
    assert b"Traceback" not in err and b"Exception" not in err


def test_a_run_that_cannot_be_stored_is_shown(call, monkeypatch):
    def full(*_, **__): raise store.StoreError("the disk is full")
    monkeypatch.setattr(store, "save", full)
    out = call("run", *TINY, "--save", "x")
    assert out.exit_code == 1 and "the disk is full" in out.stderr
    assert "loss at the end" in out.stdout


# ------------------------------------------------- options

def test_none_can_be_said(call):
    for word in "none", "None", "null":
        out = call(
            "run",
            *TINY,
            "--set",
            f"qk_norm={word}",
            "--set",
            "max_grad_norm=none",
            "--save",
            word,
        )
        assert out.exit_code == 0, out.output
    assert store.load("none").max_grad_norm.isna().all()


@pytest.mark.parametrize("args, words", [
    (["--scale", "nonsense"], "not one of"),
    (["--lr", "0.1", "--set", "learning_rate=0.5"], "learning_rate is given twice"),
    (["--set", "norm=l2", "--set", "norm=rmsnorm"], "norm is given twice"),
    (["--device", "nonsense"], "nonsense")])
def test_what_can_not_be_meant_is_refused(call, args, words):
    out = call("run", *TINY, *args)
    assert out.exit_code != 0 and words in out.stderr and "Traceback" not in out.output


def test_set_may_give_what_an_option_defaults_to(call):
    out = call("run", *TINY, "--set", "learning_rate=0.5")
    assert out.exit_code == 0 and "0.5" in out.stdout


def test_the_module_is_the_command():
    out = subprocess.run([sys.executable, "-m", "stabbook.cli", "--version"], text=True,
                         capture_output=True, cwd=ROOT)
    assert out.stdout.strip() == "stabbook 0.1.0"


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
    import importlib.metadata
    real = importlib.metadata.version

    def fake(name):
        if name in ("dask", "seaborn"): raise importlib.metadata.PackageNotFoundError
        return real(name)
    monkeypatch.setattr(importlib.metadata, "version", fake)
    monkeypatch.setenv("PATH", "")
    out = call("doctor")
    assert out.exit_code == 0
    for words in ('".[plots]"', '".[book]"', '".[dev]"', "lacks seaborn", "lacks dask",
                  "no g++"):
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
