"""A sweep from a file: none, methods of one's own, code of one's own, kind errors."""
import pytest

from stabbook.methods import METHODS
from stabbook.model import ModelConfig
from stabbook.norms import NORMS
from stabbook.run import Run
from stabbook.sweep import from_toml, grid

BASE = '[base]\ncorpus = "markov:1,4,0,20000"\nsteps = 3\nwarmup_steps = 1\n'
RUN = Run(corpus="markov:1,4,0,20000", steps=3, warmup_steps=1)


@pytest.fixture
def read(tmp_path):
    def reader(text):
        (tmp_path / "mine.toml").write_bytes(text if isinstance(text, bytes)
                                             else text.encode())
        return from_toml(tmp_path / "mine.toml")
    return reader


def keys(jobs): return [j.key for j in jobs]


def test_none_is_none_where_a_field_may_be_none(read):
    asked = read(BASE + '[grid]\nmax_grad_norm = ["none", 1.0]\n'
                 'qk_norm = ["None", "l2"]')
    assert keys(asked.jobs) == keys(grid(RUN, max_grad_norm=[None, 1.0],
                                         qk_norm=[None, "l2"]))
    assert asked.jobs[0].run.max_grad_norm is None is asked.jobs[0].run.model.qk_norm
    base, = read(BASE + 'max_grad_norm = "none"\n'
                 '[base.model]\nrope_theta = "none"').jobs
    assert base.run.max_grad_norm is None is base.run.model.rope_theta


def test_none_stays_a_word_where_it_is_one(read):
    "qk_norm_gain knows the text none"
    job, = read(BASE + '[base.model]\nqk_norm = "rmsnorm"\nqk_norm_gain = "none"').jobs
    assert job.run.model.qk_norm_gain == "none"
    with pytest.raises(ValueError, match="schedule='none' is not one of"):
        read(BASE + 'schedule = "none"')


def test_a_table_is_a_method_of_ones_own(read):
    text = BASE + ('[methods.mine]\nqk_norm = "rmsnorm"\nattn_logit_softcapping = 30\n'
                   'sliding_window = "none"\n')
    changes = dict(qk_norm="rmsnorm", attn_logit_softcapping=30.0)
    assert keys(read(text).jobs) == keys(grid(RUN, {"baseline": {}, "mine": changes}))
    asked = read(text + '[grid]\nmethods = ["qk_norm", "mine"]\nseed = "0-1"')
    assert [j.labels["method"] for j in asked.jobs] == ["qk_norm"] * 2 + ["mine"] * 2
    assert asked.jobs[2].run.model == ModelConfig(**changes)
    assert "mine" not in METHODS


@pytest.mark.parametrize("text, words", [
    ("[methods.qk_norm]\nqk_norm = 'l2'", "the name of a method of the book"),
    ("[methods.mine]\nqk_nrom = 'l2'", "did you mean 'qk_norm'"),
    ("[methods.mine]\nqk_norm = 'l3'", "did you mean 'l2'"),
    ("[methods.mine]\n[grid]\nmethods = ['mien']", "did you mean 'mine'"),
    ("[methods]\nmine = 3", "written under .methods.mine."),
    ("learning_rate = 3", r"learning_rate belongs under \[base\] or \[grid\]"),
    ("hidden_size = 3", r"hidden_size belongs under \[base.model\] or \[grid\]"),
    ("learning_rat = 3", "key 'learning_rat' is not one of"),
    ("setp = 'x'", "did you mean 'setup'"),
    ("setup = 3", "the name of a module or file"),
    ("setup = 'no_such_module_here'", "no_such_module_here"),
    ("setup = 'no_such_file.py'", "no_such_file.py"),
    ("[base]\nlerning_rate = 3", "did you mean 'learning_rate'")])
def test_mistakes_are_named_with_the_nearest_that_is_right(read, text, words):
    kinds = ValueError, OSError, ImportError
    with pytest.raises(kinds, match=f"mine.toml: .*{words}"): read(text)


def test_a_file_is_utf_8_whatever_the_locale_and_whatever_it_begins_with(read):
    text = BASE + '# Größe\n[methods."größer"]\nhidden_size = 128\n'
    found = [read(b.encode("utf-8") if b is text else b).jobs[1].labels["method"]
             for b in (text, b"\xef\xbb\xbf" + text.encode())]
    assert found == ["größer"] * 2
    with pytest.raises(ValueError, match="is not valid TOML"):
        read(text.encode("cp1252"))


def test_setup_is_found_beside_the_file_and_runs_before_the_grid(read, tmp_path):
    (tmp_path / "my_norms_here.py").write_text(
        "from stabbook.norms import NORMS, RMSNorm\nNORMS['beside'] = RMSNorm\n")
    try:
        asked = read('setup = "my_norms_here.py"\n' + BASE)
        assert "beside" in NORMS
    finally: NORMS.pop("beside", None)
    assert asked.setup == (str(tmp_path / "my_norms_here.py"),)
