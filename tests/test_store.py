"""Store: atomic files, damaged files, other versions, closed folders, verdicts."""
import errno
import json
import os
import stat
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from stabbook import store
from stabbook.store import StoreError


@dataclass(frozen=True)
class Run:
    learning_rate: float = 0.01
    seed: int = 0
    dtype: str = "float32"

    def to_dict(self): return asdict(self)

    @property
    def key(self): return f"{int(self.learning_rate * 1e6):08x}{self.seed:08x}"


def record(lr=0.01, seed=0, loss=2.5, error="", **summary):
    return SimpleNamespace(
        run=Run(lr, seed), curves=dict(loss=np.linspace(5, 2, 400, dtype=np.float32)),
        summary=dict(final_loss=loss, val_loss=loss, initial_loss=5.5, error=error,
                     max_attention_logit=9.0, **summary),
        provenance=dict(torch="2.13.0", wall_seconds=2.0, commit="abc"))


@pytest.fixture
def results(tmp_path, monkeypatch):
    monkeypatch.setenv("STABBOOK_RESULTS", str(tmp_path / "results"))
    return tmp_path / "results"


def test_there_and_back(results):
    r = record(loss=np.float64(2.25), steps_done=np.int64(400), status=None)
    path = store.save(r, "exp", "cpu", {"method": "qk_norm"})
    assert path == results / "exp" / "cpu" / "parts" / f"{r.run.key}.parquet"
    df = store.load("exp", "cpu")
    wanted = {"method", "learning_rate", "seed", "diverged", "final_loss", "val_loss",
              "max_attention_logit", "error", "verdict", "key", "run_json"}
    assert wanted <= set(df.columns)
    assert (df.final_loss[0], df.steps_done[0], df.method[0]) == (2.25, 400, "qk_norm")
    back = store.read(r.run.key, "exp")
    assert back["run"] == r.run.to_dict() and back["label"] == {"method": "qk_norm"}
    assert back["summary"] == {**r.summary, "final_loss": 2.25, "steps_done": 400}
    assert np.array_equal(back["curves"]["loss"], r.curves["loss"])


def test_names_that_collide_are_kept_apart(results):
    r = record()
    r.provenance["dtype"] = "bfloat16"
    r.provenance["seed"] = 0
    store.save(r, "exp", "cpu")
    df = store.load("exp")
    assert df["dtype"][0] == "float32" and df["provenance.dtype"][0] == "bfloat16"
    assert "provenance.seed" not in df
    assert store.read(r.run.key, "exp")["provenance"]["dtype"] == "bfloat16"


def test_root_environment_then_parents_then_here(tmp_path, monkeypatch):
    monkeypatch.delenv("STABBOOK_RESULTS", raising=False)
    deep = tmp_path / "a" / "b"
    deep.mkdir(parents=True)
    monkeypatch.chdir(deep)
    assert store.root() == deep / "stabbook-results"
    (tmp_path / "book" / "results").mkdir(parents=True)
    assert store.root() == tmp_path / "book" / "results"
    monkeypatch.setenv("STABBOOK_RESULTS", "")  # empty is as good as not set
    assert store.root() == tmp_path / "book" / "results"
    monkeypatch.setenv("STABBOOK_RESULTS", str(tmp_path / "mine"))
    assert store.root() == tmp_path / "mine"
    monkeypatch.setenv("STABBOOK_RESULTS", "~/mine")
    assert store.root() == Path.home() / "mine" == store.root("~/mine")


def test_largest_scale_wins(results):
    for scale, loss in ("smoke", 4.0), ("cpu", 3.0), ("gpu", 2.0):
        store.save(record(loss=loss), "exp", scale)
        assert store.load("exp").final_loss[0] == loss
    assert store.best_scale("exp") == "gpu"
    assert store.load("exp", "smoke").final_loss[0] == 4.0


def test_unknown_names(results):
    store.save(record(), "learning_rate", "cpu")
    with pytest.raises(StoreError, match="did you mean 'learning_rate'"):
        store.load("learning_rte")
    with pytest.raises(ValueError, match="did you mean 'smoke'"):
        store.load("learning_rate", "smok")
    with pytest.raises(StoreError, match="nothing is stored .*'gpu', but at cpu"):
        store.load("learning_rate", "gpu")
    with pytest.raises(ValueError, match="letters, digits"):
        store.save(record(), "../up", "cpu")
    with pytest.raises(StoreError, match="is not among the 1 of"):
        store.read("0" * 16, "learning_rate")
    with pytest.raises(ValueError, match="did you mean 'loss'"):
        store.curves("learning_rate", name="losss")
    with pytest.raises(ValueError, match="'raise', 'skip'"):
        store.load("learning_rate", on_bad="ignore")


def damage_half(path): path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
def damage_empty(path): path.write_bytes(b"")
def damage_text(path): path.write_text("PAR1 not really PAR1")
def damage_foreign(path): pq.write_table(pa.table({"a": [1, 2]}), path)


def damage_name(path):
    "Another run's file under this run's name"
    path.write_bytes(path.with_name(f"{Run(seed=0).key}.parquet").read_bytes())


def rewrite(path, drop=(), note=None):
    "The same file without some columns, or with another note"
    table = pq.read_table(path)
    meta = table.schema.metadata
    if note is not None: meta = {b"stabbook": json.dumps(note).encode()}
    pq.write_table(table.drop_columns(list(drop)).replace_schema_metadata(meta), path)


def damage_note(path): rewrite(path, note=dict(store_version=1))
def damage_note_list(path): rewrite(path, note=dict(store_version=1, columns=["key"]))
def damage_columns(path): rewrite(path, ["final_loss"])
def damage_key(path): rewrite(path, ["key"])
def damage_run(path): rewrite(path, ["run_json"])
def damage_curve(path): rewrite(path, ["curve.loss"])


@pytest.mark.parametrize("damage", [
    damage_half, damage_empty, damage_text, damage_foreign, damage_name, damage_note,
    damage_note_list, damage_columns, damage_key, damage_run, damage_curve])
def test_damaged_file_is_named_and_the_rest_is_readable(results, damage):
    store.save(record(seed=0), "exp", "cpu")
    bad = store.save(record(seed=1), "exp", "cpu")
    damage(bad)
    before = bad.read_bytes()
    with pytest.raises(StoreError) as e:
        store.load("exp")
    assert bad.name in str(e.value) and "delete it" in str(e.value)
    assert "1 of 2 files" in str(e.value)
    df = store.load("exp", on_bad="skip")
    assert len(df) == 1 and len(df.attrs["bad_files"]) == 1
    for act in (lambda: store.save(record(seed=1), "exp", "cpu"),
                lambda: store.read(bad.stem, "exp"), lambda: store.curves("exp")):
        with pytest.raises(StoreError, match=f"(?s){bad.name}.*delete it"): act()
    assert bad.read_bytes() == before


def test_a_file_says_which_run_it_holds_when_its_name_says_another(results):
    path = store.save(record(seed=0), "exp", "cpu")
    path.rename(path.with_name("A.parquet"))
    with pytest.raises(StoreError, match=f"A.parquet holds the run {path.stem}, not "):
        store.load("exp")


def test_a_file_that_may_not_be_read_is_not_to_be_deleted(results, monkeypatch):
    path = store.save(record(), "exp", "cpu")

    def denied(self): raise PermissionError(errno.EACCES, "Permission denied")
    monkeypatch.setattr(Path, "read_bytes", denied)
    with pytest.raises(StoreError, match="change the file's permissions") as e:
        store.load("exp")
    assert path.name in str(e.value) and "delete" not in str(e.value)


@pytest.mark.parametrize("act", [
    lambda: store.keys("exp", "cpu"), lambda: store.load("exp"), store.experiments])
def test_a_folder_closed_for_reading_is_said_to_be_that(results, monkeypatch, act):
    store.save(record(), "exp", "cpu")

    def denied(*_): raise PermissionError(errno.EACCES, "Permission denied")
    monkeypatch.setattr(os, "listdir", denied)
    monkeypatch.setattr(Path, "iterdir", denied)
    with pytest.raises(StoreError, match="it cannot be read: change its permissions"):
        act()


def test_advice_names_no_command_that_does_not_exist(results):
    store.save(record(), "mine", "smoke")  # a .toml file's: no experiment of the book
    for act in lambda: store.load("mine", "cpu"), lambda: store.load("mien"):
        with pytest.raises(StoreError, match="stabbook sweep") as e: act()
        assert "stabbook sweep mi" not in str(e.value)


def test_cut_at_any_byte_is_noticed(results):
    path = store.save(record(), "exp", "cpu")
    whole = path.read_bytes()
    for n in range(0, len(whole), 97):
        path.write_bytes(whole[:n])
        with pytest.raises(StoreError):
            store._read(path)


def test_other_version_is_said_and_not_overwritten(results, monkeypatch):
    path = store.save(record(), "exp", "cpu")
    before = path.read_bytes()
    monkeypatch.setattr(store, "STORE_VERSION", 2)
    for act in (lambda: store.load("exp"), lambda: store.save(record(), "exp", "cpu")):
        with pytest.raises(StoreError, match="store version 1, and this .* version 2"):
            act()
    assert path.read_bytes() == before


@pytest.mark.parametrize("code, words", [
    (errno.ENOSPC, "disk is full"), (errno.EROFS, "cannot be written to"),
    (errno.EACCES, "cannot be written to")])
@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_disk_errors_leave_nothing_torn(results, monkeypatch, code, words, call):
    store.save(record(seed=0), "exp", "cpu")

    def fail(*a, **k): raise OSError(code, os.strerror(code))
    monkeypatch.setattr(os, call, fail)
    with pytest.raises(StoreError, match=words) as e:
        store.save(record(seed=1), "exp", "cpu")
    monkeypatch.undo()
    monkeypatch.setenv("STABBOOK_RESULTS", str(results))
    assert str(results / "exp" / "cpu") in str(e.value)
    assert [p.name for p in (results / "exp" / "cpu" / "parts").iterdir()] == [
        f"{Run(seed=0).key}.parquet"]
    assert len(store.load("exp")) == 1


def test_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StoreError, match="STABBOOK_RESULTS"):
        store.save(record(), "exp", "cpu", results=tmp_path / "file")


def test_interrupt_while_writing_is_passed_on_and_leaves_nothing(results, monkeypatch):
    store.prepare("exp", "cpu")

    def interrupt(fd): raise KeyboardInterrupt
    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        store.save(record(), "exp", "cpu")
    assert list((results / "exp" / "cpu" / "parts").iterdir()) == []


@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOTSUP, errno.EACCES])
def test_a_folder_that_cannot_be_synced_is_no_fault(results, monkeypatch, code):
    real = os.fsync

    def fsync(fd):
        if stat.S_ISDIR(os.fstat(fd).st_mode): raise OSError(code, os.strerror(code))
        return real(fd)
    monkeypatch.setattr(os, "fsync", fsync)
    assert store.save(record(), "exp", "cpu").exists() and len(store.load("exp")) == 1


def test_killed_while_saving_leaves_whole_files_only(results):
    code = ("import sys; sys.path.insert(0, 'tests'); from test_store import *\n"
            "print('go', flush=True)\n"
            "for seed in range(10**6): store.save(record(seed=seed), 'exp', 'cpu')")
    here = Path(__file__).parent.parent
    for wait in (0.01, 0.05, 0.11):
        p = subprocess.Popen([sys.executable, "-c", code], cwd=here,
                             stdout=subprocess.PIPE)
        p.stdout.readline()
        time.sleep(wait)
        p.kill()
        p.wait(), p.stdout.close()
        if store.experiments(): assert store.load("exp").attrs["bad_files"] == []
    assert len(store.keys("exp", "cpu")) > 0


def test_verdicts_use_the_best_cell_of_each_method(results):
    table = {("baseline", 0.001): [3.0, 3.1, 3.2], ("baseline", 0.01): [2.5, 2.6, 2.7],
             ("baseline", 0.1): [2.7, 3.5, np.nan], ("qk_norm", 0.01): [2.0, 2.1, 2.2],
             ("qk_norm", 0.1): [2.3, 2.5, 6.0]}
    for (method, lr), losses in table.items():
        for seed, loss in enumerate(losses):
            r = record(lr, seed + 10 * (method == "qk_norm"), loss)
            store.save(r, "exp", "cpu", {"method": method})
    df = store.load("exp", margin=0.3)
    got = df.groupby(["method", "learning_rate"]).verdict.agg(list).to_dict()
    assert got == {
        ("baseline", 0.001): ["ok"] * 3,  # slower than the best, so never derailed
        ("baseline", 0.01): ["ok"] * 3,
        ("baseline", 0.1): ["ok", "derailed", "non_finite"],
        ("qk_norm", 0.01): ["ok"] * 3,
        ("qk_norm", 0.1): ["ok", "derailed", "above_initial"]}
    assert df.behind.dtype == bool and df.behind.sum() == 4
    assert df.failed.isna().all()  # nobody trained the model without attention here
    assert df.diverged.tolist() == [x == "non_finite" or x == "above_initial"
                                    or x != x or loss > 2.3 for x, loss in
                                    zip(df.verdict, df.final_loss)]
    assert set(df.best_loss) == {2.6, 2.1} and set(df.best_rate) == {0.01}
    assert store.load("exp", margin=3.0).behind.sum() == 2
    given = store.load("exp", best={"qk_norm": (0.0, 1.0)})
    assert (given[given.method == "qk_norm"].verdict != "ok").all()
    assert store.load("exp", by=()).best_loss.nunique() == 1


def test_errors_are_no_divergence_and_do_not_set_the_best(results):
    store.save(record(0.01, 0, 2.5), "exp", "cpu", {"method": "a"})
    store.save(record(0.02, 0, float("nan"), error="MemoryError"), "exp", "cpu",
               {"method": "a"})
    store.save(record(0.03, 0, None, error="hung"), "exp", "cpu", {"method": "b"})
    df = store.load("exp")
    assert df.verdict.tolist() == ["ok", "error", "error"] and not df.behind.any()
    assert df.diverged.tolist() == [True, False, False]  # its loss curve went to 2
    assert store.provenance(df)["errors"] == 2


def test_provenance_in_a_few_words(results):
    for seed in range(3): store.save(record(seed=seed), "exp", "cpu")
    about = store.provenance(store.load("exp"))
    assert about["torch"] == "2.13.0" and about["runs"] == 3
    assert about["wall_hours"] == pytest.approx(6 / 3600)
    json.dumps(about)


def test_stack_pads_with_nan(results):
    long, short = record(seed=0), record(seed=1)
    short.curves["loss"] = short.curves["loss"][:7]
    for r in (long, short): store.save(r, "exp", "cpu")
    found = store.curves("exp", keys=[short.run.key, long.run.key])
    out = store.stack(found, [short.run.key, long.run.key])
    assert out.shape == (2, 400) and np.isnan(out[0, 7:]).all()
    assert np.array_equal(out[1], long.curves["loss"])


def test_sources_change_when_a_run_is_added(results):
    store.save(record(seed=0), "exp", "cpu")
    before = store.sources("exp")
    store.save(record(seed=1), "exp", "cpu")
    assert len(before) == 1 and len(store.sources("exp")) == 2


def many(count=400):
    for seed in range(count):
        store.save(record(seed=seed, **{f"s{i}": float(i) for i in range(30)}), "exp",
                   "smoke", {"method": "a"})


def fastest(act, times=5):
    seconds = []
    for _ in range(times):
        start = time.process_time()
        act()
        seconds.append(time.process_time() - start)
    return min(seconds)


def test_four_hundred_runs_load_fast(results):
    many()
    assert fastest(lambda: store.load("exp")) < 1.5
    store.pack("exp", "smoke")
    assert fastest(lambda: store.load("exp")) < 0.1


# ------------------------------------------------------------------ tables

def test_packed_runs_are_the_same_runs(results):
    for seed, method in enumerate(("a", "b", "c")):
        store.save(record(seed=seed, extra=None if seed else 3), "exp", "cpu",
                   {"method": method})
    before, curves = store.load("exp"), store.curves("exp")
    records = {k: store.read(k, "exp") for k in before.key}
    assert store.pack("exp", "cpu") == 3 and not any(store.parts_folder(
        "exp", "cpu").glob("*"))
    assert store.load("exp").equals(before)
    assert all(np.array_equal(c, curves[k]) for k, c in store.curves("exp").items())
    for key, was in records.items():
        now = store.read(key, "exp")
        assert {p: now[p] for p in ("run", "label", "summary", "provenance")} == {
            p: was[p] for p in ("run", "label", "summary", "provenance")}
    assert store.keys("exp", "cpu") == set(before.key)


def test_a_second_pack_adds_a_segment_and_touches_no_other(results):
    store.save(record(seed=0), "exp", "cpu")
    store.pack("exp", "cpu")
    first = (store.folder("exp", "cpu") / "curves-000.parquet").read_bytes()
    store.save(record(seed=1), "exp", "cpu")
    assert len(store.load("exp")) == 2 and len(store.load("exp", published=True)) == 1
    assert store.pack("exp", "cpu") == store.pack("exp", "cpu") == 2
    base = store.folder("exp", "cpu")
    assert [p.name for p in sorted(base.glob("*.parquet"))] == [
        "curves-000.parquet", "curves-001.parquet", "runs.parquet"]
    assert (base / "curves-000.parquet").read_bytes() == first


def test_files_of_the_old_place_are_read_and_packed(results):
    path = store.save(record(), "exp", "cpu")
    path.rename(path.parents[1] / path.name)
    assert len(store.load("exp")) == 1 and store.pack("exp", "cpu") == 1
    assert [p.name for p in store.sources("exp")] == ["runs.parquet"]


def test_state_of_a_run(results):
    good, bad = record(seed=0), record(seed=1, error="MemoryError: 3 GB")
    for r in (good, bad): store.save(r, "exp", "cpu")
    for _ in range(2):
        assert store.state(good.run.key, "exp", "cpu") == "ok"
        assert store.state(bad.run.key, "exp", "cpu") == "failed"
        assert store.state("0" * 16, "exp", "cpu") == ""
        store.pack("exp", "cpu")


def test_a_run_that_raised_and_was_trained_again_replaces_the_packed_one(results):
    bad, good = record(error="MemoryError: 3 GB"), record(loss=2.25)
    store.save(bad, "exp", "cpu")
    store.pack("exp", "cpu")
    good.curves["loss"] = good.curves["loss"] + 1
    store.save(good, "exp", "cpu")
    for _ in range(2):
        assert store.state(good.run.key, "exp", "cpu") == "ok"
        assert store.load("exp").final_loss.tolist() == [2.25]
        assert store.read(good.run.key, "exp")["summary"]["error"] == ""
        assert store.curves("exp")[good.run.key][0] == good.curves["loss"][0]
        assert store.pack("exp", "cpu") == 1


def test_only_the_wanted_runs(results):
    for seed in range(4): store.save(record(seed=seed), "exp", "cpu")
    wanted = [record(seed=s).run.key for s in (1, 2)]
    assert set(store.load("exp", keys=wanted).seed) == {1, 2}


@pytest.mark.parametrize("damage", [damage_half, damage_empty, damage_text,
                                    damage_foreign])
def test_a_damaged_table_is_named_and_parts_are_still_read(results, damage):
    store.save(record(seed=0), "exp", "cpu")
    store.pack("exp", "cpu")
    store.save(record(seed=1), "exp", "cpu")
    damage(store.folder("exp", "cpu") / "runs.parquet")
    with pytest.raises(StoreError, match="runs.parquet"): store.load("exp")
    assert len(store.load("exp", on_bad="skip")) == 1
    with pytest.raises(StoreError, match="runs.parquet"): store.pack("exp", "cpu")
    assert len(list(store.parts_folder("exp", "cpu").glob("*.parquet"))) == 1


def test_columns_of_two_kinds_are_refused_and_nothing_is_lost(results):
    for seed, value in enumerate((1.5, "much")):
        store.save(record(seed=seed, odd=value), "exp", "cpu")
    with pytest.raises(StoreError, match="column 'odd' holds float and str"):
        store.pack("exp", "cpu")
    assert len(store.load("exp")) == 2


def test_a_pack_that_is_killed_loses_nothing(results):
    assert kills_of_a_pack(results, 6) == []


def kills_of_a_pack(results, times, count=60):
    "Kill a process that packs, at random; what was lost or read twice."
    code = ("import sys; sys.path.insert(0, 'tests'); from stabbook import store\n"
            "print('go', flush=True); store.pack('killed', 'cpu')")
    rng, lost, here = np.random.default_rng(0), [], Path(__file__).parent.parent
    for n in range(times):
        for seed in range(count): store.save(record(seed=seed + n * count), "killed",
                                             "cpu", results=results)
        wanted = {Run(seed=s).key for s in range((n + 1) * count)}
        p = subprocess.Popen([sys.executable, "-c", code], cwd=here, text=True,
                             stdout=subprocess.PIPE,
                             env={**os.environ, "STABBOOK_RESULTS": str(results)})
        p.stdout.readline()
        time.sleep(rng.uniform(0, 0.35))
        p.kill(), p.wait(), p.stdout.close()
        df = store.load("killed", "cpu", results=results)
        curves = store.curves("killed", "cpu", results=results)
        if set(df.key) != wanted or not df.key.is_unique: lost.append(n)
        if curves.keys() != wanted: lost.append(n)
    return lost


def test_a_width_can_be_told_from_another(results):
    @dataclass(frozen=True)
    class Wide(Run):
        width: int = 64

        def to_dict(self): return {"seed": self.seed, "model": {
            "hidden_size": self.width, "layer_pattern": [{"a": 1}]}}

        @property
        def key(self): return f"{self.width:016x}"
    for width in (64, 128):
        r = record()
        r.run = Wide(width=width)
        store.save(r, "exp", "cpu")
    for _ in range(2):
        df = store.load("exp")
        assert df["model.hidden_size"].tolist() == [64, 128]
        assert df["model.layer_pattern"].tolist() == ['[{"a": 1}]'] * 2
        store.pack("exp", "cpu")


def test_every_stored_run_has_the_key_of_what_it_was_asked():
    "The published runs, from what they were asked: text, then run, then key."
    from stabbook.train import Run as Real
    base, wrong = Path(__file__).parents[1] / "book" / "results", []
    for name in store.experiments(base):
        for scale in ("cpu", "gpu"):
            rows = store.load(name, scale, results=base, published=True) \
                if (base / name / scale / "runs.parquet").exists() else None
            for key, text in zip(*(rows[c] for c in ("key", "run_json"))) \
                    if rows is not None else ():
                if Real.from_dict(json.loads(text)).key != key: wrong.append(key)
    assert wrong == []


def test_store_does_not_import_torch():
    code = "import sys, stabbook.store; print('torch' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert out.stdout.strip() == "False", out.stderr


if __name__ == "__main__":  # python tests/test_store.py 100
    import tempfile
    with tempfile.TemporaryDirectory() as folder:
        lost = kills_of_a_pack(Path(folder), int(sys.argv[1]))
    print(f"{sys.argv[1]} kills, {len(lost)} lost something")
