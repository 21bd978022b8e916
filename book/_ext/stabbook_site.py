"""What the site needs beyond its theme, in one small Sphinx extension.

It links the style sheet, serves one build of MathJax and nothing else of it,
sets dark or light before the first paint, and writes the page's description.
Each hook below is one concern; build.py has to know none of them.
"""

from html import escape
from importlib.util import find_spec
from pathlib import Path
from shutil import copytree, ignore_patterns
from urllib.parse import urljoin

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.errors import ExtensionError

HERE = Path(__file__).resolve().parent
STATIC = HERE.parent / "_static"
MATHJAX = "sphinx-mathjax-offline"  # a folder with hyphens, never imported
# One combined build, its fonts, and the TeX extensions it loads by itself.
MATHJAX_PARTS = (
    "tex-chtml.js",
    "input/tex/extensions",
    "output/chtml/fonts/woff-v2",
)

# Runs in <head> before anything is painted: no flash of white for dark readers.
FIRST_PAINT = """
(() => {
  const root = document.documentElement;
  const dark = matchMedia("(prefers-color-scheme: dark)").matches;
  let mode = "auto";
  try { mode = localStorage.getItem("mode") || "auto"; } catch (error) {}
  root.dataset.mode = mode;
  root.dataset.theme = mode === "dark" || mode === "light"
    ? mode : (dark ? "dark" : "light");
})();
"""


def configure(app: Sphinx, config) -> None:
    "Serve `book/_static` from where it lies: style sheet, logo, icon, MathJax."
    config.templates_path.append(str(HERE / "templates"))
    if str(STATIC) not in config.html_static_path:
        config.html_static_path.append(str(STATIC))
    linked = [f if isinstance(f, str) else f[0] for f in config.html_css_files]
    if "custom.css" not in linked:
        config.html_css_files.append("custom.css")
    logo = str(STATIC / "logo.svg")
    config.html_theme_options.setdefault(
        "logo", {"text": "stabbook", "alt_text": "stabbook, to the first page",
                 "image_light": logo, "image_dark": logo})
    config.html_favicon = config.html_favicon or str(STATIC / "favicon.svg")
    config.mathjax_path = "mathjax/tex-chtml.js"


def serve_mathjax(app: Sphinx, error: Exception | None) -> None:
    "Copy the one build of MathJax that the pages load."
    if error or app.builder.format != "html":
        return
    spec = find_spec(MATHJAX)
    if spec is None or not spec.origin:
        raise ExtensionError(
            f"{MATHJAX} is not installed: run `pip install {MATHJAX}`, "
            "or `pip install stabbook[book]` for all that the book needs"
        )
    source = Path(spec.origin).parent / "static" / "mathjax"
    target = Path(app.outdir) / "_static" / "mathjax"
    for part in MATHJAX_PARTS:
        if (source / part).is_dir():
            copytree(source / part, target / part, dirs_exist_ok=True,
                     ignore=ignore_patterns("*.map"))
        else:
            target.mkdir(parents=True, exist_ok=True)
            (target / part).write_bytes((source / part).read_bytes())


def subtitle(doctree: nodes.document | None) -> str:
    "The one-line subtitle under the title, or else the first paragraph."
    if doctree is None:
        return ""
    for kind in (nodes.block_quote, nodes.paragraph):
        for node in doctree.findall(kind):
            text = " ".join(node.astext().split())
            if text:
                return text if len(text) <= 200 else text[:199].rsplit(" ", 1)[0] + "…"
    return ""


def describe(app: Sphinx, pagename, templatename, context, doctree) -> None:
    "Description and Open Graph tags of one page."
    site = app.config.html_title or app.config.project
    title = app.env.titles.get(pagename)
    title = title.astext() if title is not None else context.get("title", site)
    tags = {"og:type": "article", "og:site_name": site, "og:title": title}
    text = subtitle(doctree)
    if text:
        tags["og:description"] = text
    if app.config.html_baseurl:
        base = app.config.html_baseurl.rstrip("/") + "/"
        tags["og:url"] = urljoin(base, f"{pagename}.html")
        tags["og:image"] = urljoin(base, "_static/card.png")
    lines = [f'<meta property="{k}" content="{escape(v)}"/>' for k, v in tags.items()]
    lines.append('<meta name="color-scheme" content="light dark"/>')
    if text:
        lines.append(f'<meta name="description" content="{escape(text)}"/>')
    context["metatags"] = context.get("metatags", "") + "\n".join(lines)


def parts(app: Sphinx) -> dict[str, str]:
    "Each page's part of the book, from the captions of the contents."
    found: dict[str, str] = {}
    root = app.env.tocs.get(app.config.root_doc)
    for toctree in root.findall(addnodes.toctree) if root else ():
        waiting = [doc for _, doc in toctree["entries"]]
        while waiting:
            doc = waiting.pop()
            if doc in found:
                continue
            found[doc] = toctree.get("caption") or ""
            waiting.extend(app.env.toctree_includes.get(doc, ()))
    return found


def eyebrow(app: Sphinx, pagename, templatename, context, doctree) -> None:
    "The name of the part, small, above the title."
    part = parts(app).get(pagename)
    if part and "<h1>" in context.get("body", ""):
        line = f'<p class="eyebrow">{escape(part)}</p>\n<h1>'
        context["body"] = context["body"].replace("<h1>", line, 1)


def drop_thebe(app: Sphinx, pagename, templatename, context, doctree) -> None:
    "jupyter-book always loads sphinx-thebe, which names another host; leave it out."
    for kind in ("script_files", "css_files"):
        context[kind] = [f for f in context.get(kind, ()) if not _is_thebe(f)]


def _is_thebe(asset) -> bool:
    body = getattr(asset, "attributes", {}).get("body") or ""
    return "thebe" in str(getattr(asset, "filename", asset)) or "THEBE_JS_URL" in body


def setup(app: Sphinx) -> dict:
    app.connect("config-inited", configure, priority=100)
    app.add_js_file(None, body=FIRST_PAINT, priority=1)
    app.connect("html-page-context", describe)
    app.connect("html-page-context", eyebrow)
    app.connect("html-page-context", drop_thebe, priority=999)
    app.connect("build-finished", serve_mathjax)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
