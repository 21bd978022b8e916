"""The notebooks keep the rules of the house, and survive the tools (traps T1 to T18)."""  # noqa: E501
import ast
import json
import re
import subprocess
import sys
from configparser import ConfigParser
from pathlib import Path

import nbformat
import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = {f.relative_to(ROOT / "nbs").with_suffix("").as_posix(): f
             for f in sorted((ROOT / "nbs").rglob("*.ipynb"))
             if ".ipynb_checkpoints" not in f.parts}
CHAPTERS = [n for n in NOTEBOOKS if re.match(r"\d\d_", n)]
EXPERIMENTS = [n for n in NOTEBOOKS if n.startswith("experiments/")]
PROSE = sorted((ROOT / "nbs").rglob("*.md"))
MODULES = {
    ".".join(f.relative_to(ROOT / "stabbook").with_suffix("").parts): f
    for f in sorted((ROOT / "stabbook").rglob("*.py"))
    if f.name != "_modidx.py"
    and f.relative_to(ROOT / "stabbook") != Path("__init__.py")
}
MAX_COLUMNS, MAX_LINES, MAX_LINES_EXPORTED = 88, 25, 40
FENCE = re.compile(r"^(`{3,}|~{3,}|:{3,}).*?^\1", re.M | re.S)

# Which modules stand on which floor (the design's table): imports go down only.
FLOORS = (
    ("core", "files", "paper", "machine"),
    ("norms", "rope", "softcap", "mask", "stats"),
    ("attention", "mlp", "embedding", "reparam", "residual"),
    ("config", "decoder", "model"),
    ("methods", "families"),
    ("data", "run", "update", "fast", "ranks", "checkpoint", "train", "monitor"),
    ("metrics", "store", "sweep"),
    ("bench", "looks", "plots", "cli"),
)
# Neighbours on one floor: who may look into whose room.
SAME_FLOOR = {
    "decoder": {"config"},
    "model": {"config", "decoder"},
    "families": {"methods"},
    "run": {"data"},
    "train": {"data", "run", "update", "fast", "ranks", "checkpoint"},
    "fast": {"run", "update"},
    "update": {"run"},
    "store": {"metrics"},
    "sweep": {"store", "metrics"},
    "cli": {"plots", "bench"},
    "bench": {"plots"},
    "plots": {"looks"},
}
FLOOR = {name: floor for floor, names in enumerate(FLOORS) for name in names}
# Which of the packages that are heavy or optional may stand at a module's top level.
OPTIONAL = {"matplotlib", "seaborn", "gensim", "transformers", "ray", "dask",
            "datasets", "statsmodels", "distributed", "papermill", "nbdev"}


def read(name):
    return nbformat.read(NOTEBOOKS[name], 4)


def code(notebook):
    "Number and cell of each code cell, counted as a reader counts: from 1"
    return [(i, c) for i, c in enumerate(notebook.cells, 1) if c.cell_type == "code"]


def python_lines(cell):
    "The lines of a code cell without nbdev's directives"
    return [x for x in cell.source.splitlines() if not re.match(r"\s*#\s*\|", x)]


def parsed(cell):
    lines = ["pass" if re.match(r"\s*[%!]", x) else x for x in cell.source.splitlines()]
    return ast.parse("\n".join(lines))


def is_field_table(cell):
    "A dataclass of many fields is a table: from twenty on it may be long"
    return any(isinstance(n, ast.ClassDef)
               and sum(isinstance(b, ast.AnnAssign) for b in n.body) >= 20
               for n in parsed(cell).body)


every = pytest.mark.parametrize("name", NOTEBOOKS)


# ------------------------------------------------------------------ the traps

@every
def test_kernel_is_python3(name):                                          # T17
    assert read(name).metadata.kernelspec.name == "python3"


@every
def test_is_committed_without_outputs_and_run_metadata(name):              # T9
    notebook = read(name)
    left = [i for i, c in code(notebook) if c.outputs or c.execution_count]
    assert not left, (
        f"{name}: cells {left} carry outputs; run nbdev_clean, clear outputs"
    )
    assert "papermill" not in json.dumps(notebook.metadata)


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_experiment_has_one_parameters_cell_with_scale(name):  # T1
    tagged = [
        c for _, c in code(read(name)) if "parameters" in c.metadata.get("tags", [])
    ]
    assert len(tagged) == 1, f"{name}: exactly one cell must be tagged 'parameters'"
    values = {t.id: ast.literal_eval(node.value) for node in parsed(tagged[0]).body
              for t in getattr(node, "targets", [getattr(node, "target", None)])}
    assert values.get("scale") == "smoke", f"{name}: scale must be 'smoke' by default"


def test_clean_keeps_tags_and_captions(tmp_path):                          # T1, T2
    (tmp_path / "settings.ini").write_text((ROOT / "settings.ini").read_text())
    (tmp_path / "nbs").mkdir()
    meta = {"tags": ["parameters", "hide-input"],
            "mystnb": {"figure": {"name": "fig-a"}, "image": {"alt": "a line"}}}
    cell = nbformat.v4.new_code_cell("scale = 'smoke'", metadata={**meta, "noise": 1})
    cell.outputs = [nbformat.v4.new_output("display_data", {"text/plain": "1"},
                                           metadata={"scrapbook": {"name": "key"}})]
    kernel = {"name": "python3", "display_name": "Python of somebody"}
    notebook = nbformat.v4.new_notebook(cells=[cell], metadata={"kernelspec": kernel})
    nbformat.write(notebook, tmp_path / "nbs" / "a.ipynb")
    tool = Path(sys.executable).with_name("nbdev_clean")
    subprocess.run([tool], cwd=tmp_path, check=True)
    cleaned = nbformat.read(tmp_path / "nbs" / "a.ipynb", 4).cells[0]
    assert cleaned.metadata == meta
    assert cleaned.outputs[0].metadata == {"scrapbook": {"name": "key"}}


def test_settings_that_the_traps_ask_for():                      # T1, T2, and pyproject
    cfg = ConfigParser(delimiters=["="])
    cfg.read(ROOT / "settings.ini")
    cfg = cfg["DEFAULT"]
    assert {"tags", "mystnb"} <= set(cfg["allowed_cell_metadata_keys"].split())
    assert cfg["clear_all"] == "False" and cfg["update_pyproject"] == "False"
    assert set(cfg["tst_flags"].split()) == {"notest", "slow", "gpu"}
    book = cfg["extra_book"].split()
    assert "nbdev==2.4.14" in book and "fastcore<2" in book and "execnb<0.2" in book


def test_one_notebook_is_one_module_and_none_is_orphaned():                # T16
    made = {}
    for name in NOTEBOOKS:
        for module in re.findall(
            r"^#\s*\|\s*default_exp\s+(\S+)",
            "\n".join(c.source for _, c in code(read(name))),
            re.M,
        ):
            made.setdefault(module, []).append(name)
    assert {m: n for m, n in made.items() if len(n) > 1} == {}
    assert set(MODULES) == set(made)


@every
def test_imports_are_absolute(name):                                       # T16
    bad = [i for i, c in code(read(name)) for node in ast.walk(parsed(c))
           if isinstance(node, ast.ImportFrom) and node.level]
    assert not bad, f"{name}: cells {bad} import relatively; write `from stabbook.x`"


@every
def test_no_bare_relative_path_and_no_show_doc(name):                      # T7, T18
    pattern = r"""(?:open|Path|read_\w+)\(\s*f?["'](?![/~])[^"']*/|show_doc\("""
    bad = [i for i, c in code(read(name)) if re.search(pattern, c.source)]
    assert not bad, f"{name}: cells {bad} depend on the folder they run in, or show_doc"


def test_nothing_calls_quarto_or_the_hyphened_commands():                  # T5, T6
    assert not (ROOT / "nbs" / "index.ipynb").exists()
    assert not (ROOT / "nbs" / "contributing.ipynb").exists()
    for name in ("Makefile", ".ci/run", "README.md", "CONTRIBUTING.md"):
        text = (ROOT / name).read_text("utf-8") if (ROOT / name).exists() else ""
        assert not re.findall(r"\bnbdev-[a-z]\w+", text), name
        if name in ("Makefile", ".ci/run"):
            assert not re.findall(r"nbdev_(?:readme|docs|preview|prepare)|quarto", text)


def test_build_products_are_not_committed():                               # T9
    done = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        pytest.skip("not a git checkout")
    bad = [
        f
        for f in done.stdout.splitlines()
        if re.match(
            r"book/_(stage|build|cache)/|book/results/[^/]+/smoke/|.*\.ipynb_checkpoints",
            f,
        )
    ]
    assert bad == []


def test_every_page_is_in_the_table_of_contents_once():                    # T14
    text = (ROOT / "_toc.yml").read_text("utf-8")
    listed = re.findall(r"(?:root|file):\s*(\S+)", text)
    assert yaml.safe_load(text)["format"] == "jb-book"
    pages = {*NOTEBOOKS, *(f.relative_to(ROOT / "nbs").with_suffix("").as_posix()
                           for f in PROSE)}
    assert sorted(listed) == sorted(pages)


# ------------------------------------------------------------------ the style

@every
def test_code_fits_the_column_and_the_screen(name):
    faults = []
    for i, cell in code(read(name)):
        lines = python_lines(cell)
        limit = MAX_LINES_EXPORTED if "export" in cell.source[:80] else MAX_LINES
        if len(lines) > limit and not is_field_table(cell):
            faults.append(f"cell {i}: {len(lines)} lines; at most {limit}: split it")
        faults += [
            f"cell {i}: {len(x)} columns; at most {MAX_COLUMNS}: {x.strip()[:40]}"
            for x in lines
            if len(x) > MAX_COLUMNS
        ]
    assert not faults, "\n".join([name, *faults])


@every
def test_a_heading_has_its_own_cell(name):
    faults = []
    for i, cell in enumerate(read(name).cells, 1):
        text = FENCE.sub("", cell.source).strip()
        if cell.cell_type == "markdown" and i > 1 and len(text.splitlines()) > 1:
            faults += [f"cell {i}: {h}" for h in re.findall(r"^#{1,4} .*", text, re.M)]
    assert not faults, "\n".join([f"{name}: put these headings in cells of their own",
                                  *faults])


@every
def test_opens_with_title_and_subtitle(name):
    first = re.sub(r"^\(\S+\)=\n", "", read(name).cells[0].source)
    assert re.match(r"# .+\n+> .+", first), f"{name}: '# Title', then '> one line'"


@pytest.mark.parametrize("name", CHAPTERS + EXPERIMENTS)
def test_has_the_frame_of_a_page(name):
    text = "\n".join(c.source for c in read(name).cells if c.cell_type == "markdown")
    wanted = ["pagebox", "You need", "You get", "Runs in", "## Summary", "## Exercises",
              "{dropdown}", "## Next"]
    missing = [w for w in wanted if w not in text]
    assert not missing, f"{name}: the page lacks {', '.join(missing)}"


@pytest.mark.parametrize("file", [*NOTEBOOKS.values(), *PROSE], ids=lambda f: f.stem)
def test_plain_english(file):
    if file.suffix == ".ipynb":
        cells = nbformat.read(file, 4).cells
        text = "\n".join(c.source for c in cells if c.cell_type == "markdown")
    else:
        text = file.read_text("utf-8")
    found = re.findall(
        r"\b(?:e\.g\.|i\.e\.|etc\.|cf\.|viz\.)|[\U0001F300-\U0001FAFF]", text
    )
    assert not found, f"{file.name}: {found}; write it in plain words"


# ------------------------------------------------------------------ the floors

def imports(file, inside=True):
    "(level, module) that a file imports: absolute names, also those inside functions"
    here = ["stabbook", *file.relative_to(ROOT / "stabbook").parent.parts]
    tree = ast.parse(file.read_text("utf-8"))
    top = [
        n
        for s in tree.body
        for n in (ast.walk(s) if isinstance(s, (ast.If, ast.Try)) else [s])
    ]
    for node in ast.walk(tree) if inside else top:
        if isinstance(node, ast.Import):
            yield from (a.name for a in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = here[:len(here) - node.level + 1] if node.level else []
            module = ".".join([*base, *((node.module or "").split("."))]).strip(".")
            yield module
            if module.split(".")[0] == "stabbook":      # `from .families import rows`
                yield from (f"{module}.{a.name}" for a in node.names)


def room(module):
    "The first name below the package: metrics.judge stands in metrics"
    return module.split(".")[0]


def edges():
    "Module -> the modules of the package that it imports, at the top or in a function"
    for name, file in MODULES.items():
        found = {i.removeprefix("stabbook.") for i in imports(file)
                 if i.startswith("stabbook.")}
        yield name, {f for f in found if f in MODULES or f"{f}.__init__" in MODULES}


@pytest.mark.parametrize("name", MODULES)
def test_a_module_imports_only_from_floors_below(name):
    assert room(name) in FLOOR, f"{name} has no floor; the design names the floors"
    floor, same = FLOOR[room(name)], SAME_FLOOR.get(room(name), set())
    up = [n for n in dict(edges())[name] if room(n) != room(name)
          and FLOOR[room(n)] >= floor and room(n) not in same]
    assert not up, f"{name} (floor {floor}) imports {up}"


def test_no_import_goes_in_a_circle():
    graph = {n.removesuffix(".__init__"): found for n, found in edges()}
    done, path = set(), []

    def visit(name):
        if name in path:
            pytest.fail(" -> ".join([*path[path.index(name):], name]))
        if name not in done:
            path.append(name)
            for other in graph.get(name, ()):
                visit(other)
            done.add(path.pop())
    for name in graph:
        visit(name)


@pytest.mark.parametrize("name", MODULES)
def test_nothing_heavy_is_imported_at_the_top(name):
    top = {n.split(".")[0] for n in imports(MODULES[name], inside=False)}
    assert not top & OPTIONAL
    assert not top & {"resource", "fcntl"}


@pytest.mark.parametrize("name", MODULES)
def test_a_room_has_at_most_600_lines(name):
    assert len(MODULES[name].read_text("utf-8").splitlines()) <= 600
