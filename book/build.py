"""Build the book: execute the notebooks, stage the pages, render the site.

    python book/build.py book                       every page of _toc.yml
    python book/build.py run learning_rate --scale cpu
    python book/build.py serve

A notebook is executed (runner.py) only when something that its outputs depend on has
changed: its code cells, the stabbook modules that it imports and those that they
import, the lock, its parameters, Python, the results that it says it reads. A staged
page (pages.py) is the notebook as it stands in nbs/ with the outputs of that run, so a
change of prose executes nothing. Sphinx sees only what has been staged.
"""
import argparse
import ast
import functools
import hashlib
import http.server
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from datetime import date
from multiprocessing import get_context
from pathlib import Path

import pages
from runner import (SCALES, BuildError, execute, nearest, parameters_of, python_source,
                    read_notebook, tags)

RUNNER = 1      # raise it when a change in these files makes the cached outputs wrong


def digest(part):
    "16 hex digits that stand for `part`"
    text = part if isinstance(part, str) else json.dumps(part, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@functools.lru_cache(maxsize=None)
def meaning(source):
    "A digest of what a module does: a comment in it changes no page's output"
    try:
        return digest(ast.dump(ast.parse(source)))
    except SyntaxError:
        return digest(source)


def digest_files(files):
    "16 hex digits that stand for the names and contents of files"
    return digest(sorted([str(f), hashlib.sha256(f.read_bytes()).hexdigest()]
                         for f in files if f.is_file() and f.suffix != ".pyc"))


def imported(source, here):
    "What a text imports of stabbook, as paths below it; `here`: where it stands"
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            paths = [a.name.split(".") for a in node.names]
        elif isinstance(node, ast.ImportFrom):      # nbdev exports `from .x`
            up = ["stabbook", *here[:len(here) - node.level + 1]] if node.level else []
            base = up + (node.module.split(".") if node.module else [])
            paths = [[*base, a.name] for a in node.names]
        else:
            continue
        yield from (path[1:] or ["__init__"] for path in paths if path[0] == "stabbook")


def tool(name):
    "A command of this environment, whether or not it is on the path"
    return str(Path(sys.executable).with_name(name))


def write(path, text):
    "Write a text, but leave an equal file alone: Sphinx goes by the time of writing"
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists() or path.read_text("utf-8") != text:
        path.write_text(text, "utf-8")


class Book:
    "One book: where its parts are, what its pages depend on, how it is made"

    def __init__(self, root):
        self.root = Path(root).resolve()
        self.nbs, self.package = self.root / "nbs", self.root / "stabbook"
        self.toc, self.lock = self.root / "_toc.yml", self.root / "requirements.lock"
        self.here = self.root / "book"
        self.cache, self.stage = self.here / "_cache", self.here / "_stage"
        self.site = self.here / "_build"
        given = os.environ.get("STABBOOK_RESULTS") or self.here / "results"
        self.results = (
            Path(given).expanduser().absolute()
        )  # each page has its own folder

    # ------------------------------------------------------------ what there is

    @functools.cached_property
    def pages(self):
        "The pages of _toc.yml in order: {name: file in nbs/}"
        import yaml

        def walk(entry):
            yield entry.get("root") or entry.get("file")
            for key in ("parts", "chapters", "sections"):
                for child in entry.get(key) or []:
                    yield from walk(child)
        names = [n for n in walk(yaml.safe_load(self.toc.read_text("utf-8"))) if n]
        files = {name: [f for f in (self.nbs / f"{name}.ipynb", self.nbs / f"{name}.md")
                        if f.exists()] for name in names}
        missing = [name for name, found in files.items() if not found]
        if missing:
            raise BuildError(
                f"_toc.yml lists {', '.join(missing)}, but nbs/ has no such "
                ".ipynb or .md: write the page or take the line out"
            )
        return {name: found[0] for name, found in files.items()}

    @property
    def notebooks(self):
        "The pages that are executed"
        return [n for n, file in self.pages.items() if file.suffix == ".ipynb"]

    def experiments(self):
        "The experiment notebooks by name"
        return {f.stem: f for f in sorted(self.nbs.glob("experiments/*.ipynb"))}

    # ------------------------------------------------------------ what a page needs

    @functools.cached_property
    def modules(self):
        "The modules of the package by their names below it, such as families.rows"
        files = sorted(self.package.rglob("*.py"))
        return {".".join(f.relative_to(self.package).with_suffix("").parts): f
                for f in files}

    def imports(self, source):
        "The stabbook modules that `source` imports, and those that they import"
        found, todo = set(), [(source, [])]
        while todo:
            text, here = todo.pop()
            for path in imported(text, here):
                steps = [".".join(path[:n]) for n in range(1, len(path) + 1)]
                wanted = {"__init__", *steps, *(f"{s}.__init__" for s in steps)}
                for name in (wanted & self.modules.keys()) - found:
                    found.add(name)
                    folder = name.split(".")[:-1]
                    todo.append((self.modules[name].read_text("utf-8"), folder))
        return sorted(found)

    def results_of(self, name):
        """The experiments whose results a page reads.

        Its own, and those of its metadata: {"stabbook": {"results": ["growth"]}}.
        The runner notes what the page opens, and fails one that opens something else.
        """
        said = read_notebook(self.pages[name]).metadata.get("stabbook", {})
        own = [Path(name).name] if name.startswith("experiments/") else []
        return sorted({*own, *said.get("results", [])})

    def result_files(self, experiments, smoke):
        "A digest of the results on disk: those of scale smoke, or those of the others"
        files = [f for e in experiments for f in (self.results / e).rglob("*.parquet")
                 if ("smoke" in f.relative_to(self.results / e).parts) == smoke]
        return digest(sorted([str(f.relative_to(self.results)), f.stat().st_size,
                              f.stat().st_mtime_ns] for f in files))

    def parameters(self, name):
        "What the book passes to a page: scale=smoke where it takes one"
        allowed = parameters_of(read_notebook(self.pages[name]), name) or []
        return {"scale": "smoke"} if "scale" in allowed else {}

    def depends(self, name):
        "Everything that decides the outputs of a page, and the experiments it reads"
        cells = [c for c in read_notebook(self.pages[name]).cells
                 if c.cell_type == "code"]
        modules, reads = sorted(self.modules), self.results_of(name)
        try:
            modules = self.imports(python_source(cells))
        except SyntaxError:
            pass                            # the run will say where; depend on all
        parts = {"code": digest([[c.source, sorted(tags(c))] for c in cells]),
                 "parameters": self.parameters(name), "runner": RUNNER,
                 "python": platform.python_version(),
                 "lock": digest(self.lock.read_text() if self.lock.exists() else ""),
                 "results": self.result_files(reads, smoke=False)}
        for module in modules:
            parts[f"stabbook.{module}"] = meaning(
                self.modules[module].read_text("utf-8")
            )
        return parts, reads

    # ------------------------------------------------------------ execute

    def record(self, name):
        "What is known of the last run of a page"
        file = self.cache / f"{name}.json"
        return json.loads(file.read_text()) if file.exists() else {}

    def why_run(self, name):
        "Why a page must run again, in words; '' when its cached run stands"
        record = self.record(name)
        if not record or not (self.cache / f"{name}.ipynb").exists():
            return "new"
        if not record["passed"]:
            return "failed last time"
        parts, reads = self.depends(name)
        old = record["depends"]
        changed = [p for p in {**old, **parts} if old.get(p) != parts.get(p)]
        if not changed and record["smoke"] != self.result_files(reads, smoke=True):
            changed = ["smoke results"]
        return ", ".join(changed) and "changed: " + ", ".join(changed)

    def environ(self, workers, log=""):
        "What a notebook finds in its environment"
        return {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONHASHSEED": "0",
                "STABBOOK_RESULTS": str(self.results), "STABBOOK_RUN_LOG": str(log),
                "LOKY_MAX_CPU_COUNT": str(workers)}     # what a sweep takes by itself

    def run_page(self, name, workers=1):
        "Execute one page into the cache and write down how it went"
        parts, reads = self.depends(name)
        log = self.cache / f"{name}.runs"
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text("")
        record = {"depends": parts, "passed": True, "error": "", "seconds": 0.0,
                  "when": date.today().isoformat()}
        try:
            record["seconds"] = execute(self.pages[name], self.cache / f"{name}.ipynb",
                                        name, self.parameters(name),
                                        self.environ(workers, log),
                                        reads=(self.results, reads))
        except BuildError as error:
            record |= {"passed": False, "error": str(error)}
        sweeps = [json.loads(line) for line in log.read_text().splitlines()]
        for key in ("trained", "reused", "failed"):
            record[key] = sum(s.get(key, 0) for s in sweeps)
        record["smoke"] = self.result_files(reads, smoke=True)
        (self.cache / f"{name}.json").write_text(json.dumps(record, indent=1))
        return record

    def haste(self, name):
        "Long pages first; before anything is known, experiments and late chapters"
        place = list(self.pages).index(name)
        return -self.record(name).get("seconds", 0), "experiments" not in name, -place

    def execute(self, jobs, force=False):
        "Run what has changed, the experiments before the pages that read them"
        late = [n for n in self.notebooks
                if not n.startswith("experiments/") and self.depends(n)[1]]
        early = [n for n in self.notebooks if n not in late]
        workers = max(1, (os.cpu_count() or 1) // jobs)
        done, ran, failed = 0, [], []
        pool = ProcessPoolExecutor(jobs, mp_context=get_context("spawn"))
        try:
            for wave in (early, late):
                why = {n: "asked for" if force else self.why_run(n) for n in wave}
                todo = {pool.submit(self.run_page, n, workers): n
                        for n in sorted(wave, key=self.haste) if why[n]}
                done += len(wave) - len(todo)
                for future in as_completed(todo):
                    name, record, done = todo[future], future.result(), done + 1
                    say_page(done, len(self.notebooks), name, record, why[name])
                    ran.append(name)
                    failed += [record["error"]] if not record["passed"] else []
        except BaseException:               # Ctrl-C: the kernels end with their parents
            for process in list(pool._processes.values()):
                process.terminate()
            raise
        finally:
            pool.shutdown(cancel_futures=True)
        if failed:
            raise BuildError("\n  ".join([f"{len(failed)} pages failed:", *failed]))
        return ran

    # ------------------------------------------------------------ stage

    def write_stage(self):
        "Everything that Sphinx reads, and nothing else, in book/_stage"
        import nbformat
        paths, wanted, found = pages.machine_paths(self.root), set(), []
        records = {n: self.record(n) for n in self.notebooks}
        for name, file in self.pages.items():
            target = self.stage / file.relative_to(self.nbs)
            if file.suffix == ".ipynb":
                run = read_notebook(self.cache / f"{name}.ipynb")
                page = pages.staged(read_notebook(file), run)
                text = nbformat.writes(page) + "\n"
            else:
                table = pages.status_table(records)
                page = text = file.read_text("utf-8").replace(pages.STATUS_MARK, table)
            found += pages.faults(name, page, paths)
            write(target, text)
            wanted.add(target)
        for file in self.assets():
            home = self.nbs if file.is_relative_to(self.nbs) else self.here
            target = self.stage / file.relative_to(home)
            wanted.add(target)
            if not target.exists() or target.read_bytes() != file.read_bytes():
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, target)
        for file in [f for f in self.stage.rglob("*") if f.is_file()]:
            if file not in wanted:
                file.unlink()
        if found:
            raise BuildError("\n  ".join(["pages show what no page may show:", *found]))

    def assets(self):
        "Files beside the pages: the bibliography, pictures, data to download"
        kinds = {".svg", ".png", ".jpg", ".csv", ".parquet", ".json"}
        beside = [f for f in self.nbs.rglob("*") if f.suffix in kinds
                  and ".ipynb_checkpoints" not in f.parts]
        return [*beside, *self.here.glob("*.bib")]

    # ------------------------------------------------------------ render

    def render(self):
        "Let jupyter-book render the stage, strictly; nothing to do if nothing changed"
        folders = [self.here / part for part in ("_static", "_ext", "_templates")]
        look = [
            self.toc,
            self.here / "_config.yml",
            self.lock,
            *self.here.glob("*.bib"),
            *(f for folder in folders for f in folder.rglob("*")),
        ]
        look, content = digest_files(look), digest_files(self.stage.rglob("*"))
        mark, log = self.site / ".made-from", self.site / "sphinx.log"
        old = mark.read_text().split() if mark.exists() else ["", ""]
        if old == [look, content] and (self.site / "html" / "index.html").exists():
            return False
        fresh = [] if old[0] == look else ["--all"]
        mark.unlink(missing_ok=True)        # after a failure every page is read again
        if fresh:
            shutil.rmtree(self.site, ignore_errors=True)
        self.site.mkdir(parents=True, exist_ok=True)
        command = [tool("jupyter-book"), "build", self.stage,
                   "--toc", self.toc, "--config", self.here / "_config.yml",
                   "--path-output", self.here, "-W", "-n", "--keep-going", *fresh]
        with open(log, "w") as file:
            done = subprocess.run(command, cwd=self.root, stdout=file, stderr=file)
        if done.returncode:
            text = re.sub(r"\x1b\[[\d;]*m", "", log.read_text("utf-8", "replace"))
            lines = text.replace(f"{self.stage}/", "nbs/").splitlines()
            told = [x for x in lines if re.search(r"WARNING|ERROR|Error:", x)] or lines[
                -15:
            ]
            raise BuildError("\n  ".join(["jupyter-book would not build the site:",
                                          *dict.fromkeys(told), f"all of it: {log}"]))
        mark.write_text(f"{look} {content}")
        return True


def say_page(done, total, name, record, why):
    "One line for a finished page: a progress bar that a log file survives"
    runs = record["trained"] + record["reused"]
    tail = (
        f"; runs trained {record['trained']}, reused {record['reused']}" if runs else ""
    )
    state = f"{record['seconds']:6.1f} s" if record["passed"] else "  FAILED"
    bar = "#" * (20 * done // total)
    why = why if len(why) < 48 else why[:44] + " ..."
    print(f"  [{bar:.<20}] {done:2}/{total} {state}  {name} ({why}{tail})", flush=True)


# ---------------------------------------------------------------- commands

def build(book, jobs=2, force=False, render=True):
    "What `make book` does once .venv is there"
    seconds, installed = {}, book.root / ".venv" / ".installed"
    if installed.exists() and installed.read_text().strip():
        seconds["install"] = float(installed.read_text())
        installed.write_text("")            # told once

    def step(name, action, *args):
        print(f"{name} ...", flush=True)
        start = time.time()
        result = action(*args)
        seconds[name] = time.time() - start
        return result

    def export():
        env = {k: v for k, v in os.environ.items() if k != "IN_TEST"}
        if subprocess.run([tool("nbdev_export")], cwd=book.root, env=env).returncode:
            raise BuildError("nbdev_export failed; its message stands above")

    if (book.root / "settings.ini").exists():
        step("export", export)
    ran = step("execute", book.execute, jobs, force)
    step("stage", book.write_stage)
    made = step("render", book.render) if render else False
    records = [book.record(n) for n in book.notebooks]
    trained = sum(book.record(n)["trained"] for n in ran)
    total = sum(r["trained"] + r["reused"] for r in records)
    print(f"\nopen          {book.site / 'html' / 'index.html'}")
    print(f"pages         {len(book.pages)} {'built' if made else 'unchanged'}; "
          f"{len(ran)} of {len(book.notebooks)} notebooks executed")
    print(f"runs          {trained} trained, {total - trained} reused")
    print("seconds       " + ", ".join(f"{k} {v:.1f}" for k, v in seconds.items())
          + f", all {sum(seconds.values()):.1f}")


def run(book, experiment, scale, workers, given):
    "What `make reproduce` does: one experiment at a scale, training what is missing"
    known = book.experiments()
    if not experiment:
        raise BuildError(f"name an experiment: EXPERIMENT={' or '.join(known)}")
    if experiment not in known:
        raise BuildError(f"EXPERIMENT={experiment} is not one of {', '.join(known)}"
                         f"{nearest(experiment, known)}")
    target = book.cache / "reproduce" / f"{experiment}-{scale}.ipynb"
    log = book.cache / "reproduce" / f"{experiment}-{scale}.runs"
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text("")
    seconds = execute(known[experiment], target, f"experiments/{experiment}",
                      {"scale": scale, **given}, book.environ(workers, log), live=True)
    print(f"{experiment} at scale {scale}: {seconds:.0f} s; results in "
          f"{book.results / experiment / scale}\nexecuted copy: {target}\n"
          "`make book` shows them.")
    sweeps = [json.loads(line) for line in log.read_text().splitlines()]
    if failed := sum(s.get("failed", 0) + s.get("reused_failed", 0) for s in sweeps):
        raise BuildError(f"{failed} runs of {experiment} are stored with an error; the "
                         "page counts them, and a sweep with retry_failed=True trains "
                         "them again")


def serve(book, port):
    "Show the site on localhost, on another port where this one is taken"
    if not (book.site / "html" / "index.html").exists():
        raise BuildError("there is no site yet; `make book` builds it")
    handler = functools.partial(http.server.SimpleHTTPRequestHandler,
                                directory=str(book.site / "html"))
    for choice in (*range(port, port + 20), 0):
        try:
            server = http.server.ThreadingHTTPServer(("127.0.0.1", choice), handler)
            break
        except OSError:
            continue
    print(f"http://localhost:{server.server_port}/  (Ctrl-C ends it)", flush=True)
    server.serve_forever()


def value(text):
    "name=value from the command line; the value as Python where it is Python"
    name, found, raw = text.partition("=")
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} is not name=value")
    try:
        return name, ast.literal_eval(raw)
    except (ValueError, SyntaxError):
        return name, raw


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--root", default=Path(__file__).parent.parent)
    commands = parser.add_subparsers(dest="command", required=True)
    sub = commands.add_parser("book", help="execute, stage, render")
    sub.add_argument("--jobs", type=int, default=2, help="notebooks at a time")
    sub.add_argument("--force", action="store_true", help="execute every notebook")
    sub.add_argument(
        "--no-render", action="store_true", help="stop before jupyter-book"
    )
    sub = commands.add_parser("run", help="run one experiment")
    sub.add_argument("experiment")
    sub.add_argument("--scale", default="smoke", help=", ".join(SCALES))
    sub.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    sub.add_argument("-p", dest="given", type=value, action="append", default=[],
                     metavar="NAME=VALUE", help="another parameter of the notebook")
    sub = commands.add_parser("serve", help="show the site on localhost")
    sub.add_argument("--port", type=int, default=8000)
    args = parser.parse_args(argv)
    book = Book(args.root)
    try:
        if args.command == "book":
            build(book, args.jobs, args.force, not args.no_render)
        elif args.command == "run":
            run(book, args.experiment, args.scale, args.workers, dict(args.given))
        else:
            serve(book, args.port)
    except BuildError as error:
        sys.exit(f"\n{error}")
    except KeyboardInterrupt:
        sys.exit("\nstopped; what has finished is kept")


if __name__ == "__main__":
    main()
