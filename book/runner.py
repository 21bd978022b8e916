"""The one strict way to execute a notebook: papermill, but nothing goes unnoticed.

papermill alone only warns of an unknown parameter, runs in whatever folder it was
started from, and counts a cell that fails on purpose as a failure. Here a parameter
that would change nothing is an error, the folder is the notebook's own, and a failure
names notebook, cell and error.
"""
import ast
import contextlib
import copy
import difflib
import os
import re
import sys
import time

SCALES = ("smoke", "cpu", "gpu")
CELL_SECONDS = int(os.environ.get("STABBOOK_CELL_SECONDS", 900))     # in a book build
DIRECTIVE = re.compile(r"^\s*#\s*\|\s*(\S.*?)?\s*$")


class BuildError(Exception):
    "A fault that the build reports in words, without a traceback"


def nearest(name, allowed):
    "'; did you mean ...?' or nothing"
    close = difflib.get_close_matches(str(name), list(allowed), n=1)
    return f"; did you mean {close[0]}?" if close else ""


def read_notebook(path):
    "The notebook as nbformat gives it"
    import nbformat
    return nbformat.read(path, as_version=4)


def tags(cell):
    "The tags of a cell"
    return cell.metadata.get("tags", [])


def directives(source):
    "The nbdev directives of a cell: {'eval': 'false', 'hide': ''}"
    found = (DIRECTIVE.match(line) for line in source.splitlines())
    pairs = [m[1].partition(" ") for m in found if m and m[1]]
    return {name.rstrip(":"): rest.strip() for name, _, rest in pairs}


def python_source(cells):
    "The code of `cells` without magics, so that `ast` can read it"
    sources = [c.source for c in cells if not c.source.lstrip().startswith("%%")]
    lines = "\n".join(sources).splitlines()
    return "\n".join(re.sub(r"^(\s*)[%!].*", r"\1pass", line) for line in lines)


# ---------------------------------------------------------------- parameters

def parameters_of(notebook, name):
    "The names assigned in the cell tagged `parameters`; None where no cell is tagged"
    tagged = [c for c in notebook.cells if "parameters" in tags(c)]
    if len(tagged) > 1:
        raise BuildError(f"{name}: {len(tagged)} cells are tagged 'parameters'; "
                         "leave one")
    if not tagged:
        return None
    names = []
    for node in ast.parse(tagged[0].source).body:
        targets = (node.targets if isinstance(node, ast.Assign) else
                   [node.target] if isinstance(node, ast.AnnAssign) else [])
        names += [t.id for t in targets if isinstance(t, ast.Name)]
    return names


def check_parameters(notebook, given, name):
    "Refuse a parameter that the notebook would ignore"
    allowed = parameters_of(notebook, name)
    if given and allowed is None:
        raise BuildError(f"{name}: no cell is tagged 'parameters', so "
                         f"{', '.join(given)} would change nothing; tag the cell")
    for key in given:
        if key not in allowed:
            raise BuildError(f"{name} has no parameter {key!r}; it has "
                             f"{', '.join(allowed)}{nearest(key, allowed)}")
    if given.get("scale", "smoke") not in SCALES:
        raise BuildError(f"scale={given['scale']!r} is not one of "
                         f"{', '.join(SCALES)}{nearest(given['scale'], SCALES)}")


# ---------------------------------------------------------------- execution

def runnable(notebook):
    """A copy to execute, where cells that must not run are tagged `skip-execution`.

    These are `#| eval: false` (unless tagged raises-exception: then nbdev_test skips
    the cell and the book shows its error) and `#| gpu`.
    """
    notebook = copy.deepcopy(notebook)
    for cell in notebook.cells:
        flags = directives(cell.source) if cell.cell_type == "code" else {}
        skip = flags.get("eval", "").lower() == "false" or "gpu" in flags
        if skip and "raises-exception" not in tags(cell):
            cell.metadata["tags"] = [*tags(cell), "skip-execution"]
    return notebook


def own_cells(notebook):
    "The cells of an executed notebook without those that papermill added"
    added = {"injected-parameters", "injected-watch", "papermill-error-cell-tag"}
    return [c for c in notebook.cells if not added & set(tags(c))]


def first_line(cell):
    "The first line of code in a cell"
    lines = [x for x in cell.source.splitlines() if x.strip() and not DIRECTIVE.match(x)]
    return lines[0].strip() if lines else ""


def failure(notebook, name):
    "What went wrong in an executed notebook, in words, or None"
    for number, cell in enumerate(own_cells(notebook), 1):
        if cell.cell_type != "code":
            continue
        errors = [o for o in cell.outputs if o.output_type == "error"]
        wanted = "raises-exception" in tags(cell)
        broken = cell.metadata.get("papermill", {}).get("exception")
        if (errors or broken) and not wanted:
            what = f"{errors[0].ename}: {errors[0].evalue}" if errors else "it died"
            return f"{name}, cell {number} `{first_line(cell)}`: {what}"
        if wanted and not errors:
            return (f"{name}, cell {number} `{first_line(cell)}`: it is tagged "
                    "raises-exception but raised nothing")
    return None


@contextlib.contextmanager
def kernel_talk(log):
    "Send what a kernel process says on its own account to a log; the real stderr back"
    real = os.dup(2)
    with open(log, "a") as file:
        os.dup2(file.fileno(), 2)
    try:
        yield os.fdopen(os.dup(real), "w", buffering=1)
    finally:
        os.dup2(real, 2)
        os.close(real)


WATCH = """\
def _watch(results={results!r}, log={log!r}):
    import os, sys
    seen = set()

    def opened(event, args):
        if event not in ("open", "os.listdir", "os.scandir") or not args:
            return
        path = os.path.abspath(args[0]) if isinstance(args[0], (str, os.PathLike)) else ""
        below = path[len(results) + 1:] if path.startswith(results + os.sep) else ""
        name, _, inside = below.partition(os.sep)
        if inside.count(os.sep) and name not in seen:       # a file of an experiment
            seen.add(name)
            with open(log, "a") as file:
                file.write(name + "\\n")
    sys.addaudithook(opened)
_watch(); del _watch"""


def watched(notebook, results, log):
    "A copy whose first cell notes which experiments' results the kernel opens"
    import nbformat
    notebook = copy.deepcopy(notebook)
    source = WATCH.format(results=str(results), log=str(log))
    cell = nbformat.v4.new_code_cell(source, metadata={"tags": ["injected-watch"]})
    notebook.cells.insert(0, cell)
    return notebook


def undeclared(name, log, reads):
    "What a page opened and does not say that it reads, in words, or None"
    seen = set(log.read_text().split()) if log.exists() else set()
    if extra := sorted(seen - set(reads)):
        said = sorted({*reads, *extra} - {name.rpartition("/")[2]})
        return (f"{name} reads the results of {', '.join(extra)} and does not say so: "
                f'give the notebook the metadata {{"stabbook": {{"results": '
                f"{said}}}}}".replace("'", '"'))
    return None


def execute(source, target, name, parameters, environ, live=False, reads=None):
    """Run notebook `source` into `target`; seconds taken, or a BuildError that says why.

    reads: the results folder and the experiments in it that the page may open.
    """
    import papermill
    from papermill.exceptions import PapermillExecutionError
    notebook = read_notebook(source)
    check_parameters(notebook, parameters, name)
    os.environ.pop("MPLBACKEND", None)      # Agg there would lose every figure
    os.environ.pop("IN_TEST", None)
    os.environ.update(environ)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.unlink(missing_ok=True)
    start, error = time.time(), None
    opened, ready = target.with_suffix(".reads"), runnable(notebook)
    if reads:
        opened.write_text("")
        ready = watched(ready, reads[0], opened)
    try:
        with kernel_talk(target.with_suffix(".kernel.log")) as stderr:
            papermill.execute_notebook(
                ready, target, parameters=parameters,
                kernel_name="python3", cwd=source.parent, progress_bar=False,
                start_timeout=120, execution_timeout=None if live else CELL_SECONDS,
                stdout_file=sys.stdout if live else None,
                stderr_file=stderr if live else None)
    except PapermillExecutionError:
        pass                                # the executed copy tells where and why
    except Exception as fault:              # a dead kernel, a cell past its time
        error = f"{name}: {type(fault).__name__}: {str(fault).strip()[-800:]}"
    error = (target.exists() and failure(read_notebook(target), name)) or error
    error = error or (reads and undeclared(name, opened, reads[1]))
    if error:
        raise BuildError(error)
    return time.time() - start
