"""Data: splits, windows, the bundled corpus, files, the Markov source, bad input."""
import builtins
import hashlib
import subprocess
import sys

import numpy as np
import pytest

from stabbook import data
from stabbook.data import Corpus, decode, load_corpus


@pytest.fixture
def small():
    return Corpus("small", np.arange(4000, dtype=np.int64).astype(np.uint8))


def test_splits_are_contiguous_and_cover_everything(small):
    assert [len(getattr(small, s)) for s in data.SPLITS] == [3600, 200, 200]
    joined = np.concatenate([small.train, small.valid, small.test])
    assert np.array_equal(joined, small.data)
    assert not np.shares_memory(small.train, small.valid)


@pytest.mark.parametrize("n", [1300, 1301, 1319, 1999, 4001])
def test_every_part_holds_a_default_window(n):
    corpus = Corpus("n", np.zeros(n, np.uint8))
    for split in data.SPLITS:
        assert corpus.eval_windows(split, 2, 64).shape == (2, 65)


@pytest.mark.parametrize("n", [0, 1, 1299])
def test_short_corpus_is_refused_with_both_numbers(n):
    with pytest.raises(ValueError, match=f"has {n} bytes, and at least 1300"):
        Corpus("short", np.zeros(n, np.uint8))


def test_empty_file_is_refused(tmp_path):
    (tmp_path / "empty.txt").touch()
    with pytest.raises(ValueError, match="has 0 bytes"):
        load_corpus(str(tmp_path / "empty.txt"))


@pytest.mark.parametrize("length", [1, 64, 199])
def test_no_window_crosses_a_split(small, length):
    for split in data.SPLITS:
        part = getattr(small, split)
        ids = small.eval_windows(split, 7, length).numpy()
        assert ids.shape == (7, length + 1)
        assert np.array_equal(ids[0], part[:length + 1])
        assert np.array_equal(ids[-1], part[-length - 1:])
    starts = small.offsets(50, 4, length, seed=3)
    assert starts.min() >= 0 and starts.max() + length < len(small.train)


@pytest.mark.parametrize("length", [0, -1, 200, 10_000])
def test_windows_that_do_not_fit_are_refused(small, length):
    with pytest.raises(ValueError, match="does not fit"):
        small.eval_windows("valid", 2, length)


@pytest.mark.parametrize("start", [-1, 3600 - 8])
def test_a_start_outside_is_refused(small, start):
    with pytest.raises(IndexError, match="0 to 3591"):
        small.window("train", [0, start], 8)


def test_offsets_reach_both_ends_and_depend_on_arguments_alone(small):
    starts = small.offsets(4000, 8, 3000, seed=0)
    assert (starts.min(), starts.max()) == (0, 599)
    again = Corpus("other", small.data[::-1].copy()).offsets(4000, 8, 3000, seed=0)
    assert np.array_equal(starts, again)
    assert not np.array_equal(starts, small.offsets(4000, 8, 3000, seed=1))


def test_offsets_are_the_same_on_every_machine(small):
    found = small.offsets(2, 3, 64, seed=100).tolist()
    assert found == [[33, 385, 3157], [930, 1247, 1775]]


def test_parts_cannot_be_written(small):
    with pytest.raises(ValueError):
        small.train[0] = 1


def test_wiki_is_the_corpus_of_the_design():
    wiki = load_corpus()
    assert len(wiki.data) == 6_089_746
    assert wiki.fingerprint == hashlib.sha256(data.read_wiki()).hexdigest()[:16]
    assert wiki.fingerprint == "34c1c63050c87cc8"
    assert decode(wiki.train[:10]) == "<mediawiki"
    assert load_corpus("wiki") is wiki


def test_wiki_is_read_without_gensim_and_without_torch():
    code = ("import sys; from stabbook.data import load_corpus; load_corpus('wiki');"
            "print([m for m in ('gensim', 'torch', 'datasets') if m in sys.modules])")
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert out.stdout.strip() == "[]", out.stderr


def test_missing_gensim_names_the_extra(monkeypatch):
    monkeypatch.setattr(data, "find_spec", lambda name: None)
    with pytest.raises(FileNotFoundError, match=r'pip install "stabbook\[book\]"'):
        data.wiki_path()


def test_other_bytes_are_refused_with_both_hashes(tmp_path):
    fake = tmp_path / "sample.bz2"
    fake.write_bytes(b"something else")
    got = hashlib.sha256(b"something else").hexdigest()
    with pytest.raises(ValueError) as e:
        data.read_wiki(fake)
    assert got in str(e.value) and data.WIKI_SHA256 in str(e.value)


def test_file_is_read_again_when_it_changes(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"a" * 2000)
    first = load_corpus(str(path))
    path.write_bytes(b"b" * 2001)
    assert load_corpus(str(path)).fingerprint != first.fingerprint


def test_unknown_names_folders_and_splits(tmp_path, small):
    with pytest.raises(FileNotFoundError, match="did you mean 'markov'"):
        load_corpus("markow")
    with pytest.raises(FileNotFoundError, match="no such file"):
        load_corpus(str(tmp_path / "no.txt"))
    with pytest.raises(IsADirectoryError, match="is a folder"):
        load_corpus(str(tmp_path))
    with pytest.raises(ValueError, match="did you mean 'valid'"):
        small.window("validation", [0], 4)


@pytest.mark.parametrize("spec, message", [
    ("markov:sybols=4", "did you mean 'symbols'"), ("markov:order=0", "order must be"),
    ("markov:1,257", "symbols 2 to 256"), ("markov:4,32", "may be at most 65,536"),
    ("markov:a", "not a whole number"), ("markov:1,2,3,4,5", "too many"),
    ("markov:length=100", "has 100 bytes"), ("markov:seed=-1", "seed 0 or more")])
def test_markov_options_that_cannot_be(spec, message):
    with pytest.raises(ValueError, match=message):
        load_corpus(spec)


@pytest.mark.parametrize("order, symbols", [(1, 4), (2, 3), (3, 2)])
def test_markov_entropy_is_that_of_the_text(order, symbols):
    table = data.markov_table(order, symbols, seed=1)
    text = data.markov_bytes(table, 200_000, seed=1).astype(np.int64) - 97
    context = sum(text[i:len(text) - order + i] * symbols ** (order - 1 - i)
                  for i in range(order))
    surprise = -np.log(table[context, text[order:]])
    error = surprise.std() / np.sqrt(len(surprise))
    assert abs(surprise.mean() - data.entropy_rate(table)) < 5 * error
    share = np.bincount(context, minlength=len(table)) / len(context)
    assert np.abs(share - data.stationary(table)).max() < 0.01


def test_markov_corpus_is_seeded():
    a, b = load_corpus("markov:1,4,7"), load_corpus("markov:1,4,8")
    assert a.entropy != b.entropy and a.fingerprint != b.fingerprint
    assert 0 < a.entropy < np.log(4) and len(a.data) == 2 ** 18


def test_hf_reads_the_text_column(tmp_path, monkeypatch):
    pytest.importorskip("datasets")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "train.txt").write_text("one line\n" * 300)
    corpus = load_corpus(f"hf:{tmp_path / 'd'}")
    assert decode(corpus.data[:18]) == "one line\none line\n"


def test_hf_without_datasets_names_the_extra(monkeypatch):
    real = builtins.__import__

    def no_datasets(name, *args, **kw):
        if name == "datasets": raise ImportError(name)
        return real(name, *args, **kw)
    monkeypatch.setattr(builtins, "__import__", no_datasets)
    with pytest.raises(ImportError, match=r"stabbook\[hf\]"):
        load_corpus("hf:any/thing")


def test_hf_without_a_text_column_lists_the_columns(tmp_path, monkeypatch):
    pytest.importorskip("datasets")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "train.csv").write_text("title,body\na,b\n")
    with pytest.raises(ValueError, match="only title, body"):
        load_corpus(f"hf:{tmp_path / 'd'}")


def test_code_is_the_source_of_the_pinned_wheel():
    code = load_corpus("code")
    assert len(code.data) == 2_218_879 and code.data.max() < 256
    assert code.fingerprint == data.CODE_SHA256[:16]
    assert code.fingerprint != load_corpus("wiki").fingerprint
    assert b"import numpy" in code.train.tobytes()


def test_code_is_read_without_importing_what_it_is():
    run = ("import sys; from stabbook.data import load_corpus; load_corpus('code');"
           "print([m for m in ('gensim', 'torch') if m in sys.modules])")
    out = subprocess.run([sys.executable, "-c", run], capture_output=True, text=True)
    assert out.stdout.strip() == "[]", out.stderr


def test_other_sources_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r'pip install "stabbook\[book\]"'):
        data.read_code(tmp_path)
    (tmp_path / "a.py").write_text("print(1)")
    with pytest.raises(ValueError, match=data.CODE_SHA256):
        data.read_code(tmp_path)


def test_a_class_has_its_methods_in_its_body():
    for name in ("window", "offsets", "eval_windows"):
        assert getattr(Corpus, name).__qualname__ == f"Corpus.{name}"
