"""What the site needs beyond its theme, in one small Sphinx extension.

It links the style sheets, sets dark or light before the first paint, describes the
page to whoever shares it, and finishes what the theme leaves: icons, map, lost pages.
Each hook below is one concern; build.py has to know none of them.
"""

import re
from html import escape
from pathlib import Path
from shutil import rmtree
from urllib.parse import urljoin

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx

HERE = Path(__file__).resolve().parent
STATIC = HERE.parent / "_static"

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
    "Serve `book/_static` from where it lies: style sheet, logo, icon."
    config.templates_path.append(str(HERE / "templates"))
    if str(STATIC) not in config.html_static_path:
        config.html_static_path.append(str(STATIC))
    linked = [f if isinstance(f, str) else f[0] for f in config.html_css_files]
    config.html_css_files += [f for f in ("custom.css", "icons.css") if f not in linked]
    logo = str(STATIC / "logo.svg")
    config.html_theme_options.setdefault(
        "logo", {"text": "stabbook", "alt_text": "stabbook, to the first page",
                 "image_light": logo, "image_dark": logo})
    config.html_favicon = config.html_favicon or str(STATIC / "favicon.svg")


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
    lines.append('<meta name="twitter:card" content="summary_large_image"/>')
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


HEAVY = re.compile(r'\s*(<script[^>]*/fontawesome\.js[^>]*></script>'
                   r'|<link[^>]*/fontawesome/[^>]*>)')
VIEWPORT = re.compile(r'\s*<meta name="viewport"[^>]*>')
ONE_VIEWPORT = '<meta name="viewport" content="width=device-width, initial-scale=1"/>'
ROOT = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"/><title>{title}</title>
<meta http-equiv="refresh" content="0; url={first}.html"/>
<link rel="canonical" href="{first}.html"/>
{tags}
</head><body><p><a href="{first}.html">{title}</a></p></body></html>
"""
LOST = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"/><title>Not here: {title}</title>
<meta name="viewport" content="width=device-width, initial-scale=1"/>
<meta name="color-scheme" content="light dark"/>
<link rel="stylesheet" href="{base}_static/custom.css"/></head>
<body style="margin: 15vh auto; max-width: 34rem; padding: 0 1rem">
<h1>This page is not in the book</h1>
<p>It may have another name now. <a href="{base}{first}.html">Start here</a>, or
<a href="{base}search.html">search the book</a>.</p></body></html>
"""


def tidy(html: str) -> str:
    "A page without the theme's script for icons, and with one viewport."
    html = VIEWPORT.sub("", HEAVY.sub("", html))
    return html.replace("<head>", f"<head>\n    {ONE_VIEWPORT}", 1)


def finish(app: Sphinx, error: Exception | None) -> None:
    "Tidy the pages that were written; map of the site, robots, the page of lost pages."
    if error or app.builder.format != "html":
        return
    out, first = Path(app.outdir), app.config.root_doc
    for page in out.rglob("*.html"):
        text = page.read_text("utf-8")
        if HEAVY.search(text):
            page.write_text(tidy(text), "utf-8")
    for file in (out / "_static" / "scripts").glob("fontawesome.js*"):
        file.unlink()
    rmtree(out / "_static" / "vendor" / "fontawesome", ignore_errors=True)
    base = app.config.html_baseurl.rstrip("/") + "/"
    urls = "".join(f"<url><loc>{base}{doc}.html</loc></url>\n"
                   for doc in sorted(app.env.found_docs))
    (out / "sitemap.xml").write_text(
        '<?xml version="1.0" encoding="UTF-8"?>\n'
        '<urlset xmlns="http://www.sitemaps.org/schemas/sitemap/0.9">\n'
        f"{urls}</urlset>\n", "utf-8")
    (out / "robots.txt").write_text(f"User-agent: *\nSitemap: {base}sitemap.xml\n")
    title = app.config.html_title or app.config.project
    (out / "404.html").write_text(LOST.format(base=base, first=first, title=title))
    head = (out / f"{first}.html").read_text("utf-8")
    tags = "\n".join(re.findall(r'<meta (?:property="og|name="(?:desc|twitter))[^>]*>',
                                head))
    (out / "index.html").write_text(
        ROOT.format(first=first, title=title, tags=tags), "utf-8")


def setup(app: Sphinx) -> dict:
    app.connect("config-inited", configure, priority=100)
    app.add_js_file(None, body=FIRST_PAINT, priority=1)
    app.connect("html-page-context", describe)
    app.connect("html-page-context", eyebrow)
    app.connect("html-page-context", drop_thebe, priority=999)
    app.connect("build-finished", finish)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
