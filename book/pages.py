"""From a notebook and the outputs of its run to a page that Sphinx may read."""
import copy
import os
import platform
import re
import sys
from importlib import metadata
from pathlib import Path

from runner import DIRECTIVE, directives, own_cells, tags

STATUS_MARK = "% status table"          # in nbs/status.md: the table goes here
VERSIONS = ("torch", "numpy", "scipy", "pandas", "pyarrow", "matplotlib", "nbdev",
            "papermill", "jupyter-book", "Sphinx", "sphinx-book-theme", "myst-nb")
RUBBLE = (                              # what no page may show, and how to mend it
    (r"#\| ?\w", "an nbdev directive",
     "only at the start of a line of code is it taken away"),
    (r"<[\w.]+[^<>\n]* at 0x[0-9a-f]+>", "an object address",
     "end the cell with a value worth looking at"),
    (r"\d+%\|[^|\n]*\||\d(?:it/s|s/it)\b", "a progress bar",
     "switch it off, or let it write to stderr"),
)
HIDING = {("hide", ""): "remove-cell", ("echo", "false"): "remove-input",
          ("output", "false"): "remove-output"}


def machine_paths(root):
    "Folders of this machine that no page may show"
    homes = (root, Path.home(), sys.prefix, os.environ.get("TMPDIR", "/tmp"))
    return sorted({str(p) for p in homes if len(str(p)) > 1}, key=len, reverse=True)


# ---------------------------------------------------------------- staging

def clean_output(output):
    "An output as a page shows it, or None where it shows none"
    output = copy.deepcopy(output)
    if output.output_type == "stream":
        if output.name == "stderr":
            return None
        output.text = re.sub(r"[^\n]*\r(?!\n)", "", output.text)
    if output.output_type == "error":       # the traceback names files of the machine
        output.traceback = [f"{output.ename}: {output.evalue}"]
    if "data" in output:
        output.data.pop("application/vnd.jupyter.widget-view+json", None)
        if not output.data:
            return None
    return output


def clean_code(cell):
    "Take the directives out of a code cell and turn those that hide into tags"
    flags = directives(cell.source)
    lines = [x for x in cell.source.splitlines() if not DIRECTIVE.match(x)]
    cell.source = "\n".join(lines).strip("\n")
    hiding = [tag for (name, value), tag in HIDING.items()
              if name in flags and flags[name].lower() == value]
    if hiding:
        cell.metadata["tags"] = [*tags(cell), *hiding]


def staged(notebook, executed):
    "The notebook as it stands in nbs/, with the outputs of its run"
    page = copy.deepcopy(notebook)
    runs = [c for c in own_cells(executed) if c.cell_type == "code"]
    for cell, run in zip((c for c in page.cells if c.cell_type == "code"), runs):
        cell.outputs = [o for o in map(clean_output, run.outputs) if o]
        cell.execution_count = None
        clean_code(cell)
    page.cells = [c for c in page.cells
                  if c.cell_type != "code" or c.source.strip() or c.outputs]
    page.metadata.pop("papermill", None)
    return page


# ---------------------------------------------------------------- checking

def shown(notebook):
    "Every text of a staged notebook that a reader sees, with the cell it is from"
    for number, cell in enumerate(notebook.cells, 1):
        if "remove-cell" in tags(cell):
            continue
        yield number, cell.source
        for output in cell.get("outputs", []):
            yield number, output.get("text", "")
            yield number, "\n".join(output.get("traceback", []))
            yield from ((number, text) for mime, text in output.get("data", {}).items()
                        if mime.startswith("text/"))


def faults_in_text(text, paths):
    "The kinds of rubble in a text, each with how to mend it"
    for pattern, what, mend in RUBBLE:
        found = re.search(pattern, text)
        if found:
            yield f"{what} ({found[0].strip()[:60]}): {mend}"
    for path in paths:
        if re.search(re.escape(path) + r"(?![\w-])", text):
            yield f"a path of this machine ({path}): show the name or a relative path"


def faults_in_figures(notebook):
    "Cells whose picture has no caption, number or alternative text"
    for number, cell in enumerate(notebook.cells, 1):
        pictures = [o for o in cell.get("outputs", [])
                    if any(mime.startswith("image/") for mime in o.get("data", {}))
                    and "scrapbook" not in o.get("metadata", {})]
        meta = cell.metadata.get("mystnb", {})
        figure, image = meta.get("figure", {}), meta.get("image", {})
        wanted = {"figure.name": figure.get("name"), "image.alt": image.get("alt"),
                  "figure.caption": figure.get("caption")}
        missing = [key for key, value in wanted.items() if not value]
        if (
            pictures
            and missing
            and not {"remove-cell", "remove-output"} & set(tags(cell))
        ):
            yield number, f"a picture without mystnb {', '.join(missing)}"


def faults(name, page, paths):
    "Everything that keeps a staged page (notebook or text) from being published"
    if isinstance(page, str):
        return [f"{name}: {fault}" for fault in faults_in_text(page, paths)]
    found = [(n, f) for n, text in shown(page) for f in faults_in_text(text, paths)]
    found += faults_in_figures(page)
    return [f"{name}, cell {number}: {fault}" for number, fault in found]


# ---------------------------------------------------------------- the status page

def status_table(records):
    "Per page: seconds, passed, when; then the versions; as markdown"
    rows = ["| page | seconds | passed | trained | reused | run on |",
            "|---|--:|---|--:|--:|---|"]
    for name, r in records.items():
        rows.append(f"| {{doc}}`/{name}` | {r['seconds']:.1f} | "
                    f"{'yes' if r['passed'] else 'no'} | {r['trained']} | "
                    f"{r['reused']} | {r['when']} |")
    total = sum(r["seconds"] for r in records.values())
    rows += [f"| all {len(records)} | {total:.1f} | | "
             f"{sum(r['trained'] for r in records.values())} | "
             f"{sum(r['reused'] for r in records.values())} | |", "",
             "| made with | version |", "|---|---|",
             f"| Python | {platform.python_version()} |"]
    for package in VERSIONS:
        try:
            rows.append(f"| {package} | {metadata.version(package)} |")
        except metadata.PackageNotFoundError:
            rows.append(f"| {package} | not installed |")
    rows += [f"| processor | {platform.machine()}, {os.cpu_count()} cores |"]
    return "\n".join(rows)
