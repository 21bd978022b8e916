"""The build: strict parameters, failures that name themselves, nothing stale, clean pages."""  # noqa: E501
import json
import os
import re
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import nbformat
import pytest
import yaml
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "book"))
sys.path.insert(0, str(ROOT / "tests"))
import build  # noqa: E402
import gates  # noqa: E402
import install  # noqa: E402
import pages  # noqa: E402
import runner  # noqa: E402

KERNEL = {"kernelspec": {"name": "python3", "display_name": "python3",
                         "language": "python"}}


def notebook(*cells):
    made = [c if not isinstance(c, str) else new_code_cell(c) for c in cells]
    return new_notebook(cells=made, metadata=KERNEL)


def tagged(source, *tags, **metadata):
    return new_code_cell(source, metadata={"tags": list(tags), **metadata})


SCALE = tagged("scale = 'smoke'\nsteps: int = 4", "parameters")


@pytest.fixture
def book(tmp_path, monkeypatch):
    "A book of three pages and a package of four modules"
    monkeypatch.delenv("STABBOOK_RESULTS", raising=False)
    for folder in ("nbs/experiments", "stabbook", "book/results/growth/cpu"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "requirements.lock").write_text("torch==2.13.0\n")
    (tmp_path / "_toc.yml").write_text(
        "format: jb-book\nroot: intro\nparts:\n- caption: One\n  chapters:\n"
        "  - file: 01_a\n  - file: experiments/growth\n")
    modules = {"__init__": "", "a": "x = 1", "b": "from .a import x",
               "c": "def f():\n    from . import b", "d": "y = 2"}
    for name, text in modules.items():
        (tmp_path / "stabbook" / f"{name}.py").write_text(text)
    (tmp_path / "nbs" / "intro.md").write_text("# Intro\n\n% status table\n")
    save(tmp_path, "01_a", notebook(new_markdown_cell("# A"), "from stabbook import c"))
    save(tmp_path, "experiments/growth", notebook(SCALE, "scale"))
    return build.Book(tmp_path)


def save(root, name, content):
    nbformat.write(content, Path(root) / "nbs" / f"{name}.ipynb")


def pretend_run(book, name):
    "Leave what an executed page leaves in the cache, without executing it"
    parts, reads = book.depends(name)
    record = {"depends": parts, "passed": True, "error": "", "seconds": 1.5,
              "when": "2026-11-29", "trained": 2, "reused": 1, "failed": 0,
              "smoke": book.result_files(reads, smoke=True)}
    target = book.cache / f"{name}.ipynb"
    target.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(runner.read_notebook(book.pages[name]), target)
    (book.cache / f"{name}.json").write_text(json.dumps(record))


# ------------------------------------------------------------------ strict parameters

def test_unknown_parameter_lists_the_valid_ones_and_the_nearest():         # T8
    with pytest.raises(runner.BuildError) as error:
        runner.check_parameters(notebook(SCALE), {"step": 3}, "growth")
    assert str(error.value) == ("growth has no parameter 'step'; it has scale, steps; "
                                "did you mean steps?")


def test_parameters_without_a_tagged_cell_are_refused():                   # T1, T8
    with pytest.raises(runner.BuildError, match="no cell is tagged 'parameters'"):
        runner.check_parameters(notebook("scale = 'smoke'"), {"scale": "cpu"}, "growth")
    with pytest.raises(runner.BuildError, match="2 cells are tagged"):
        runner.check_parameters(notebook(SCALE, tagged("x = 1", "parameters")),
                                {"x": 2}, "growth")


def test_a_scale_that_is_none_is_refused():
    with pytest.raises(runner.BuildError, match="not one of smoke, cpu, gpu; did you"):
        runner.check_parameters(notebook(SCALE), {"scale": "gpuu"}, "growth")
    runner.check_parameters(notebook(SCALE), {"scale": "gpu", "steps": 9}, "growth")


def test_unknown_experiment_lists_the_valid_ones(book):
    with pytest.raises(
        build.BuildError, match="not one of growth; did you mean growth"
    ):
        build.run(book, "grwth", "smoke", 1, {})


def test_values_from_the_command_line():
    assert build.value("steps=4") == ("steps", 4)
    assert build.value("name=a=b") == ("name", "a=b")
    assert build.value("rates=[0.1, 1]") == ("rates", [0.1, 1])


# ------------------------------------------------------------------ execution, for real

def execute(book, name, parameters=None, reads=None):
    target = book.cache / f"{name}.ipynb"
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import json, runner, pathlib\n"
        "s, t, n, p, r = sys.argv[2:]\n"
        "s, t, p, r = pathlib.Path(s), pathlib.Path(t), json.loads(p), json.loads(r)\n"
        "try: runner.execute(s, t, n, p, {}, reads=r)\n"
        "except runner.BuildError as e: sys.exit(str(e))"
    )
    given = json.dumps(None if reads is None else [str(book.results), list(reads)])
    done = subprocess.run([sys.executable, "-c", code, ROOT / "book",
                           book.nbs / f"{name}.ipynb", target, name,
                           json.dumps(parameters or {}), given],
                          capture_output=True, text=True)
    return done, target


def test_a_run_gets_its_parameters_its_folder_and_skips_what_it_must(book):  # T7, T8
    save(book.root, "experiments/growth", notebook(
        SCALE, "import os; os.path.basename(os.getcwd()), scale, steps",
        "#| eval: false\n1 / 0", "#| gpu\n1 / 0",
        tagged("#| eval: false\n{}['key']", "raises-exception"), "'last'"))
    done, target = execute(book, "experiments/growth", {"scale": "cpu", "steps": 7})
    assert done.returncode == 0, done.stderr
    cells = runner.own_cells(runner.read_notebook(target))
    assert cells[1].outputs[0].data["text/plain"] == "('experiments', 'cpu', 7)"
    assert not cells[2].outputs and not cells[3].outputs
    assert cells[4].outputs[0].ename == "KeyError"
    assert cells[5].outputs[0].data["text/plain"] == "'last'"
    staged = pages.staged(runner.read_notebook(book.nbs / "experiments/growth.ipynb"),
                          runner.read_notebook(target))
    text = nbformat.writes(staged)                                          # T9
    assert "injected-parameters" not in text and "papermill" not in text
    assert "Traceback" not in text and "KeyError: 'key'" in text
    assert "cpu" in text and len(staged.cells) == 6


def test_a_failing_cell_fails_the_build_and_is_named(book):                # T11
    save(book.root, "experiments/growth", notebook(
        SCALE, "x = 1", "#| export\nx / 0\nx", "'never'"))
    save(book.root, "01_a", notebook(tagged("1 + 1", "raises-exception")))
    done = subprocess.run([sys.executable, ROOT / "book" / "build.py", "--root",
                           book.root, "book"], capture_output=True, text=True)
    assert done.returncode == 1
    assert (
        "experiments/growth, cell 3 `x / 0`: ZeroDivisionError: division by zero"
        in (done.stderr)
    )
    assert "01_a, cell 1 `1 + 1`: it is tagged raises-exception but raised nothing" in (
        done.stderr)
    assert "Traceback" not in done.stderr and not book.stage.exists()
    assert re.search(r"\[#{20}\]  2/2   FAILED  ", done.stdout)
    assert not build.Book(book.root).record("01_a")["passed"]
    assert book.why_run("01_a") == "failed last time"


# ------------------------------------------------------------------ what is unchanged

def test_closure_follows_relative_imports_and_stops_there(book):           # T10
    assert book.imports("import stabbook.c") == ["__init__", "a", "b", "c"]
    assert book.imports("from stabbook.b import x") == ["__init__", "a", "b"]
    assert book.imports("from stabbook import d") == ["__init__", "d"]
    assert book.imports("import torch") == []
    wing = book.package / "wing"
    wing.mkdir()
    (wing / "__init__.py").write_text("from .rows import r")
    (wing / "rows.py").write_text("from ..a import x as r")
    again = build.Book(book.root)
    assert again.imports("from stabbook.wing import r") == [
        "__init__", "a", "wing.__init__", "wing.rows"]
    assert again.imports("from stabbook.wing.rows import r") == [
        "__init__", "a", "wing.__init__", "wing.rows"]


def test_runs_again_when_what_it_depends_on_changes(book, monkeypatch):    # T10
    assert book.why_run("01_a") == "new"
    pretend_run(book, "01_a")
    assert book.why_run("01_a") == ""
    (book.package / "d.py").write_text("y = 3")
    assert book.why_run("01_a") == "", "a module that it does not import"
    save(
        book.root, "01_a", notebook(new_markdown_cell("# B"), "from stabbook import c")
    )
    assert book.why_run("01_a") == "", "prose"
    (book.package / "a.py").write_text((book.package / "a.py").read_text() + "  # so")
    assert book.why_run("01_a") == "", "a comment in a module"
    (book.package / "a.py").write_text("x = 2")
    assert book.why_run("01_a") == "changed: stabbook.a"
    (book.package / "a.py").write_text("x = ")
    assert "stabbook.a" in book.why_run("01_a"), "no Python: the run says where"
    (book.package / "a.py").write_text("x = 2")
    pretend_run(book, "01_a")
    save(book.root, "01_a", notebook("from stabbook import c", "1"))
    assert book.why_run("01_a") == "changed: code"
    pretend_run(book, "01_a")
    book.lock.write_text("torch==2.14.0\n")
    assert book.why_run("01_a") == "changed: lock"
    pretend_run(book, "01_a")
    monkeypatch.setattr(build.platform, "python_version", lambda: "3.99.0")
    assert book.why_run("01_a") == "changed: python"
    pretend_run(book, "01_a")
    (book.cache / "01_a.ipynb").unlink()
    assert book.why_run("01_a") == "new"


def declaring(content, *experiments):
    content.metadata["stabbook"] = {"results": list(experiments)}
    return content


def test_runs_again_when_results_that_it_reads_change(book):
    save(book.root, "01_a", declaring(notebook("from stabbook import d"), "growth"))
    for name in ("01_a", "experiments/growth"):
        pretend_run(book, name)
        assert book.why_run(name) == ""
    file = book.results / "growth" / "cpu" / "1.parquet"
    file.write_bytes(b"1")
    assert (
        book.why_run("01_a") == book.why_run("experiments/growth") == "changed: results"
    )
    for name in ("01_a", "experiments/growth"):
        pretend_run(book, name)
    smoke = book.results / "growth" / "smoke" / "2.parquet"
    smoke.parent.mkdir()
    smoke.write_bytes(b"2")
    assert book.why_run("01_a") == "changed: smoke results"


def test_results_read_are_those_that_a_page_names(book):
    assert book.results_of("01_a") == []
    assert book.results_of("experiments/growth") == ["growth"]
    save(book.root, "01_a", declaring(notebook("1"), "growth", "other"))
    assert book.results_of("01_a") == ["growth", "other"]


@pytest.mark.parametrize("reader", [
    "import pathlib as p; p.Path(f).read_bytes()", "from os import open as o; o(f, 0)",
    "h = open; h(f, 'rb').close()"])
def test_a_page_that_reads_what_it_does_not_name_fails(book, reader):
    file = book.results / "growth" / "cpu" / "1.parquet"
    file.write_bytes(b"1")
    cells = f"f = {str(file)!r}", reader
    save(book.root, "01_a", notebook(*cells))
    done = execute(book, "01_a", reads=())[0]
    assert done.returncode == 1
    assert "01_a reads the results of growth and does not say so" in done.stderr
    assert '{"stabbook": {"results": ["growth"]}}' in done.stderr
    done, target = execute(book, "01_a", reads=("growth",))
    assert done.returncode == 0, done.stderr
    assert len(runner.own_cells(runner.read_notebook(target))) == 2


def test_the_results_folder_is_the_same_in_every_page(book, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("STABBOOK_RESULTS", "mine")
    assert build.Book(book.root).results == tmp_path / "mine"
    monkeypatch.setenv("STABBOOK_RESULTS", "~/mine")
    assert build.Book(book.root).results == Path.home() / "mine"
    monkeypatch.setenv("STABBOOK_RESULTS", "")
    assert build.Book(book.root).results == book.root / "book" / "results"


def test_a_failed_run_fails_make_reproduce(book):
    line = '{"trained": 1, "reused": 0, "failed": 2}'
    save(book.root, "experiments/growth", notebook(SCALE, (
        "import os\nwith open(os.environ['STABBOOK_RUN_LOG'], 'a') as f: "
        f"f.write({line!r})")))
    done = subprocess.run([sys.executable, ROOT / "book" / "build.py", "--root",
                           book.root, "run", "growth"], capture_output=True, text=True)
    assert done.returncode == 1
    assert "2 runs of growth are stored with an error" in done.stderr


def test_scale_is_smoke_only_where_a_page_takes_it(book):
    assert book.parameters("experiments/growth") == {"scale": "smoke"}
    assert book.parameters("01_a") == {}


def test_a_page_that_is_listed_but_missing(book):
    (book.nbs / "01_a.ipynb").unlink()
    with pytest.raises(build.BuildError, match="_toc.yml lists 01_a, but nbs/ has no"):
        book.pages


# ------------------------------------------------------------------ staging

def test_staging_strips_directives_and_hides(book):                        # T3
    source = notebook("#| default_exp a", "#| export\n# | slow\nx = 1\n\ny = '#'",
                      "#| hide\nx", "#| echo: false\nx", "#| output: false\nx")
    page = pages.staged(source, source)
    assert [c.source for c in page.cells] == ["x = 1\n\ny = '#'", "x", "x", "x"]
    assert [c.metadata.get("tags") for c in page.cells] == [
        None, ["remove-cell"], ["remove-input"], ["remove-output"]]
    assert source.cells[2].source.startswith("#| hide"), "the source is left alone"


def test_staging_drops_stderr_and_what_a_carriage_return_wiped_out():
    cell = new_code_cell("1", outputs=[
        new_output("stream", name="stderr", text="/x.py: a warning"),
        new_output("stream", name="stdout", text="1%\r2%\rdone\nkept\r\n"),
        new_output("display_data", {"application/vnd.jupyter.widget-view+json": {}})])
    page = pages.staged(notebook("1"), new_notebook(cells=[cell]))
    assert [o.text for o in page.cells[0].outputs] == ["done\nkept\r\n"]


@pytest.mark.parametrize("text, what", [
    ("<stabbook.norms.RMSNorm object at 0x7f00aa>", "an object address"),
    ("[<function f at 0x7f00aa>]", "an object address"),
    (f"see {ROOT}/nbs", "a path of this machine"),
    (f"{sys.prefix}/lib/python", "a path of this machine"),
    ("45%|####    | 9/20 [00:01<00:01]", "a progress bar"),
    ("12.5it/s", "a progress bar"), ("a #| export line", "an nbdev directive")])
def test_no_page_shows_rubble(text, what):
    paths = pages.machine_paths(ROOT)
    output = new_output("execute_result", {"text/plain": text})
    for page in (text, notebook(new_markdown_cell(text)),
                 notebook(new_code_cell("1", outputs=[output]))):
        found = pages.faults("01_a", page, paths)
        assert found and found[0].startswith("01_a") and what in found[0]


def test_ordinary_text_is_no_rubble():
    paths = pages.machine_paths(ROOT)
    for text in (
        "| a | 5 % | b |",
        "x < 3 at 0",
        "loss at 0.1",
        "store #1 | two",
        "100%",
    ):
        assert pages.faults("01_a", text, paths) == []


def test_a_picture_needs_number_caption_and_alternative_text():  # T12
    picture = new_output(
        "display_data", {"image/png": "iVBOR", "text/plain": "<Figure>"}
    )
    bare = notebook(new_code_cell("plot()", outputs=[picture]))
    assert pages.faults("01_a", bare, []) == [
        "01_a, cell 1: a picture without mystnb figure.name, image.alt, figure.caption"]
    meta = {"mystnb": {"figure": {"name": "fig-a", "caption": "It grows."},
                       "image": {"alt": "a line that rises"}}}
    good = notebook(new_code_cell("plot()", outputs=[picture], metadata=meta))
    assert pages.faults("01_a", good, []) == []


def test_stage_holds_what_is_listed_and_keeps_times(book):
    for name in book.notebooks:
        pretend_run(book, name)
    stale = book.stage / "old.ipynb"
    stale.parent.mkdir(parents=True)
    stale.write_text("{}")
    book.write_stage()
    files = sorted(f.relative_to(book.stage).as_posix()
                   for f in book.stage.rglob("*") if f.is_file())
    assert files == ["01_a.ipynb", "experiments/growth.ipynb", "intro.md"]
    page = book.stage / "01_a.ipynb"
    os.utime(page, (1e9, 1e9))
    save(
        book.root,
        "experiments/growth",
        notebook(SCALE, "scale", new_markdown_cell("n")),
    )
    book.write_stage()
    assert page.stat().st_mtime == 1e9, (
        "an equal page keeps its time, so Sphinx skips it"
    )
    assert "n" in (book.stage / "experiments/growth.ipynb").read_text()
    status = (book.stage / "intro.md").read_text()
    assert "| {doc}`/01_a` | 1.5 | yes | 2 | 1 | 2026-11-29 |" in status
    assert "| papermill | 2." in status and pages.STATUS_MARK not in status


def test_rubble_stops_the_build_and_names_the_page(book):
    save(book.root, "01_a", notebook(new_markdown_cell(f"look in {book.root}")))
    for name in book.notebooks:
        pretend_run(book, name)
    with pytest.raises(build.BuildError, match="01_a, cell 1: a path of this machine"):
        book.write_stage()


# --------------------------------------------------------------- settings, gates, tools

def test_config_executes_nothing_and_reads_only_the_toc():             # T11, T14, T19
    config = yaml.safe_load((ROOT / "book" / "_config.yml").read_text("utf-8"))
    assert config["execute"]["execute_notebooks"] == "off"
    assert config["execute"]["raise_on_error"] is True
    assert config["only_build_toc_files"] is True
    sphinx = config["sphinx"].get("config", {})
    assert sphinx["nb_output_stderr"] == "remove" and sphinx["numfig"] is True
    for _, inventory in sphinx.get("intersphinx_mapping", {}).values():
        assert inventory and not str(inventory).startswith("http"), "must work offline"


def project(folder, source):
    (folder / "nbs").mkdir()
    (folder / "settings.ini").write_text((ROOT / "settings.ini").read_text())
    nbformat.write(notebook("#| default_exp a", f"#| export\n{source}"),
                   folder / "nbs" / "01_a.ipynb")
    for command in ("nbdev_clean", "nbdev_export"):
        subprocess.run([build.tool(command)], cwd=folder, env=gates.ENV, check=True)


def test_gates_find_an_unclean_notebook_and_a_changed_or_orphaned_module(
    tmp_path,
):  # T16
    project(tmp_path, "x = 1")
    assert gates.gate_clean(tmp_path) == gates.gate_export(tmp_path) == []
    module = tmp_path / "stabbook" / "a.py"
    module.write_text(module.read_text().replace("x = 1", "x = 2"))
    (tmp_path / "stabbook" / "gone.py").write_text("")
    assert gates.gate_export(tmp_path) == ["stabbook/a.py: -x = 2",
                                           "stabbook/gone.py: nothing makes this file"]
    file = tmp_path / "nbs" / "01_a.ipynb"
    file.write_text(
        file.read_text().replace('"metadata": {}', '"metadata": {"x": 1}', 1)
    )
    before = file.read_bytes()
    assert [f.split(":")[0] for f in gates.gate_clean(tmp_path)] == ["nbs/01_a.ipynb"]
    assert file.read_bytes() == before, "a gate changes nothing"


def test_a_python_that_does_not_fit_gets_a_plain_answer():
    for version in ((3, 10, 4), (3, 14, 0)):
        with pytest.raises(
            SystemExit, match="(?s)needs Python 3.11, 3.12 or 3.13.*PYTHON="
        ):
            install.check_python(version)
    install.check_python((3, 13, 0))


def test_lock_pins_everything_and_names_no_place():
    lines = (ROOT / "requirements.lock").read_text().splitlines()[1:]
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in lines)
    pins = dict(line.split("==") for line in lines)
    assert pins["torch"] == "2.13.0" and pins["nbdev"] == "2.4.14"
    assert pins["jupyter-book"] == "1.0.4.post1" and "stabbook" not in pins


def test_help_is_the_default_target_and_names_every_target():
    done = subprocess.run(
        ["make"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for target in ("book", "test", "serve", "reproduce", "verify", "clean", "lock"):
        assert f"make {target}" in done.stdout


def test_verify_passes_on_what_it_is_given():
    def says(*words):
        command = ["make", "-n", "-o", ".venv/.installed", "verify", *words]
        env = {k: v for k, v in os.environ.items() if not k.startswith("MAKE")}
        done = subprocess.run(
            command, cwd=ROOT, env=env, capture_output=True, text=True, check=True
        )
        return " ".join(done.stdout.split())
    assert says() == '.venv/bin/stabbook verify -n "5" --scale "cpu"'
    assert says("N=2", "EXPERIMENT=learning_rate", "SCALE=gpu", "SEED=7") == (
        '.venv/bin/stabbook verify learning_rate -n "2" --scale "gpu" --seed "7"')


def test_serve_takes_another_port_when_its_own_is_taken(book):
    html = book.site / "html"
    html.mkdir(parents=True)
    (html / "index.html").write_text("a page")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        server = subprocess.Popen(
            [sys.executable, ROOT / "book" / "build.py", "--root", book.root, "serve",
             "--port", str(port)], stdout=subprocess.PIPE, text=True)
        try:
            url = server.stdout.readline().split()[0]
            assert url.startswith("http://localhost:") and str(port) not in url
            assert urllib.request.urlopen(url, timeout=10).read() == b"a page"
        finally:
            server.kill()
            server.wait()
