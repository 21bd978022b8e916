"""The built site: its files, and what a reader's browser makes of them.

`make book` builds the site; `.venv/bin/pytest tests/test_site.py` looks at it.
Without a site or without Chromium these tests are skipped, except where CI is set.
"""
import functools
import http.server
import json
import os
import re
import shutil
import threading
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag, urljoin, urlsplit

import pytest

ROOT = Path(__file__).resolve().parents[1]
SITE = Path(os.environ.get("STABBOOK_SITE", ROOT / "book" / "_build" / "html"))
CHROMIUM = shutil.which("chromium") or "/usr/bin/chromium"
QUIET = ("--no-sandbox", "--disable-background-networking", "--disable-sync",
         "--disable-component-update", "--disable-quic", "--disable-dev-shm-usage")
PATIENCE = 120_000      # ms; a page takes half a second, unless the machine is busy
WIDTHS = (375, 1100, 1440)
REPOSITORY = "https://github.com/stabbook/stabbook"
COLAB = "https://colab.research.google.com/github/stabbook/stabbook/blob/main/nbs/"
VOID = {"area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta",
        "source", "track", "wbr"}


def need(there, reason):
    "Skip where something is missing; on CI, where nothing may be missing, fail."
    if not there:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(reason)


# ------------------------------------------------------------------ reading html

class Page(HTMLParser):
    "One built page: its tags in order, each with the classes that it stands in."

    def __init__(self, file):
        super().__init__()
        self.name = file.relative_to(SITE).as_posix()
        self.tags, self.text, self.open = [], [], []
        self.html = file.read_text("utf-8")
        self.feed(self.html)

    def handle_starttag(self, tag, attrs):
        attrs = {k: v or "" for k, v in attrs}
        self.tags.append((tag, attrs, [(t, c) for t, c in self.open]))
        if tag not in VOID:
            self.open.append((tag, attrs.get("class", "").split()))

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, {k: v or "" for k, v in attrs}, list(self.open)))

    def handle_endtag(self, tag):
        while self.open and self.open.pop()[0] != tag:
            pass

    def handle_data(self, data):
        if not {"script", "style"} & {t for t, _ in self.open}:
            self.text.append((data, list(self.open)))

    def all(self, tag, inside=None):
        "Attributes of each `tag`; with `inside`, only within that tag or class."
        return [attrs for t, attrs, around in self.tags if t == tag
                and (inside is None or any(inside == a or inside in c
                                           for a, c in around))]

    def said(self, inside="article"):
        "The text that a reader sees inside a tag or class."
        return "".join(d for d, around in self.text
                       if any(inside == a or inside in c for a, c in around))

    @property
    def ids(self):
        return {a["id"] for _, a, _ in self.tags if "id" in a}


@pytest.fixture(scope="module")
def pages():
    "Every page of the site by its name."
    need((SITE / "index.html").exists(), "there is no site yet: run `make book`")
    files = (f for f in sorted(SITE.rglob("*.html"))
             if not f.relative_to(SITE).parts[0].startswith("_"))
    found = {p.name: p for p in map(Page, files)}
    return {n: p for n, p in found.items()
            if 'http-equiv="refresh"' not in p.html and n != "404.html"}


@pytest.fixture(scope="module")
def chapters(pages):
    "The pages that people wrote: those with an article of the contents."
    made = {"genindex.html", "search.html", "py-modindex.html"}
    return {n: p for n, p in pages.items() if n not in made}


def source_of(name):
    "The file in nbs/ that a page was made from, or None."
    for suffix in (".ipynb", ".md"):
        file = (ROOT / "nbs" / name).with_suffix(suffix)
        if file.exists():
            return file
    return None


def test_every_page_of_the_contents_is_built(chapters):
    files = re.findall(r"^\s*(?:- file|root):\s*(\S+)", (ROOT / "_toc.yml").read_text(),
                       re.M)
    assert {f"{f}.html" for f in files} == set(chapters)


def test_internal_links_and_anchors_resolve(pages):
    broken = []
    for page in pages.values():
        for tag, key in (("a", "href"), ("img", "src"), ("script", "src"),
                         ("link", "href")):
            for attrs in page.all(tag):
                link = attrs.get(key, "")
                if not link or urlsplit(link).scheme or link.startswith("//"):
                    continue
                path, anchor = urldefrag(urljoin(page.name, link))
                path = unquote(urlsplit(path).path) or page.name
                if path.endswith("/"):
                    path += "index.html"
                if not (SITE / path).is_file():
                    broken.append(f"{page.name}: {link} leads to no file")
                elif (
                    anchor and path in pages and unquote(anchor) not in pages[path].ids
                ):
                    broken.append(f"{page.name}: {link} has no such anchor")
    assert not broken, "\n".join(sorted(set(broken)))


def test_nothing_is_loaded_from_another_host(pages):
    loads = []
    for page in pages.values():
        for tag, key in (("script", "src"), ("img", "src"), ("iframe", "src"),
                         ("source", "src"), ("video", "src"), ("object", "data")):
            loads += [f"{page.name}: {a[key]}" for a in page.all(tag)
                      if re.match(r"(https?:)?//", a.get(key, ""))]
        loads += [f"{page.name}: {a['href']}" for a in page.all("link")
                  if re.match(r"(https?:)?//", a.get("href", ""))
                  and a.get("rel") != "canonical"]
        loads += [f"{page.name}: names {cdn}" for cdn in
                  ("cdn.jsdelivr", "cdnjs.", "unpkg.com", "fonts.googleapis")
                  if cdn in page.html]
    for css in SITE.glob("_static/**/*.css"):
        loads += [f"{css.name}: {url}" for url in re.findall(
            r"url\(['\"]?((?:https?:)?//[^)]*)", css.read_text("utf-8", "ignore"))]
    assert not loads, "\n".join(loads)


def test_every_picture_has_alternative_text(chapters):
    bare = [f"{p.name}: {a.get('src')}" for p in chapters.values()
            for a in p.all("img", inside="article") if len(a.get("alt", "").strip()) < 5
            or a["alt"].strip() == a.get("src", "").rsplit("/", 1)[-1]
            or "_images/" in a["alt"]]
    bare += [f"{p.name}: {a.get('src')}" for p in chapters.values()
             for a in p.all("img") if "alt" not in a]
    assert not bare, "\n".join(bare)


def test_every_figure_has_a_number_and_a_caption(chapters):
    wrong = []
    for page in chapters.values():
        for attrs, around in ((a, c) for t, a, c in page.tags if t == "img"):
            inside = [t for t, _ in around]
            if "article" in inside and "figure" not in inside:
                wrong.append(f"{page.name}: {attrs.get('src')} is no figure")
        figures = re.findall(r"<figure.*?</figure>", page.html, re.S)
        for figure in figures:
            caption = re.search(r"<figcaption.*?</figcaption>", figure, re.S)
            text = re.sub(r"<[^>]*>", "", caption[0]) if caption else ""
            if not re.search(r"caption-number", figure) or len(text.split()) < 6:
                wrong.append(f"{page.name}: figure with caption {text.strip()!r}")
    assert not wrong, "\n".join(wrong)


def test_no_page_shows_its_scaffolding(chapters):
    "No nbdev directive, parameters cell, progress bar, address or machine path."
    rubble = {
        r"#\|": "an nbdev directive",
        r"default_exp": "an nbdev directive",
        r"injected-parameters": "papermill's cell",
        r" at 0x[0-9a-f]+": "an address",
        r"/(work|tmp|root|home|mnt)/\w": "a path of the building machine",
        r"\d+%\|": "a progress bar",
        r"(it/s|s/it)\b": "a progress bar",
        r"papermill\.": "papermill's metadata",
        r"(Future|Deprecation|User|Runtime)Warning": "a warning",
        r"\\\(|\$\$": "unrendered math",
    }
    found = []
    for page in chapters.values():
        shown = "".join(d for d, c in page.text if any("article" == t for t, _ in c)
                        and not any("math" in k for _, k in c))
        prose = "".join(d for d, c in page.text if any("article" == t for t, _ in c)
                        and not any("pre" == t for t, _ in c))
        if re.search(r"np\.(float|int)\d+\(", prose):
            found.append(f"{page.name}: a number with its type: glue float(x), not x")
        for pattern, what in rubble.items():
            hit = re.search(pattern, shown)
            if hit:
                around = shown[max(0, hit.start() - 40):hit.end() + 40]
                found.append(f"{page.name}: {what}: {' '.join(around.split())}")
    assert not found, "\n".join(found)


def test_launch_source_and_download_buttons_lead_to_files(chapters):
    wrong = []
    for name, page in chapters.items():
        source = source_of(name)
        assert source, f"{name} was made from no file in nbs/"
        links = {
            a.get("href", "") for a in page.all("a", inside="article-header-buttons")
        }
        path = source.relative_to(ROOT).as_posix()
        want = {f"{REPOSITORY}/edit/main/{path}", REPOSITORY}
        if source.suffix == ".ipynb":
            want.add(COLAB + source.relative_to(ROOT / "nbs").as_posix())
        wrong += [f"{name}: no button to {w}" for w in want - links]
        wrong += [f"{name}: a Colab button on a page that can't run" for link in links
                  if "colab" in link and source.suffix != ".ipynb"]
        wrong += [f"{name}: no issue button" for _ in [0]
                  if not any("/issues/new" in link for link in links)]
        sources = [link for link in links if "_sources/" in link]
        wrong += [f"{name}: nothing to download" for _ in [0] if not sources]
    assert not wrong, "\n".join(wrong)


def test_head_of_every_page(chapters):
    wrong = []
    for name, page in chapters.items():
        meta = {a.get("property") or a.get("name"): a.get("content")
                for a in page.all("meta")}
        if page.all("html")[0].get("lang") != "en":
            wrong.append(f"{name}: its language is not said to be English")
        wrong += [f"{name}: no {key}" for key in (
            "og:title", "og:type", "og:url", "og:image", "og:description",
            "description", "viewport") if not meta.get(key)]
        if len(page.all("h1", inside="article")) != 1:
            wrong.append(f"{name}: {len(page.all('h1', inside='article'))} titles")
        if meta.get("og:url") and not meta["og:url"].endswith("/" + name):
            wrong.append(f"{name}: og:url is {meta['og:url']}")
    assert not wrong, "\n".join(wrong)
    assert (SITE / "_static" / "card.png").stat().st_size < 300_000


def test_headings_step_down_one_at_a_time(chapters):
    wrong = []
    for name, page in chapters.items():
        levels = [int(t[1]) for t, a, c in page.tags if re.fullmatch(r"h[1-6]", t)
                  and any("article" == x for x, _ in c)]
        wrong += [f"{name}: h{a} is followed by h{b}" for a, b in
                  zip(levels, levels[1:]) if b > a + 1]
    assert not wrong, "\n".join(wrong)


def test_next_leads_through_the_whole_book(chapters):
    root = re.search(r"^root:\s*(\S+)", (ROOT / "_toc.yml").read_text(), re.M)[1]
    at, seen = f"{root}.html", []
    while at and at not in seen:
        seen.append(at)
        following = [a["href"] for a in chapters[at].all("a")
                     if "right-next" in a.get("class", "")]
        at = urljoin(at, following[0]) if following else None
    assert set(seen) == set(chapters)


def test_chapters_have_the_page_frame(chapters):
    wrong = []
    for name, page in chapters.items():
        if not re.match(r"\d\d_|experiments/", name):
            continue
        titles = set(re.findall(r"<h2>([^<]*)", page.html))
        wrong += [f"{name}: no section {t}" for t in ("Summary", "Exercises", "Next")
                  if t not in titles]
        box = page.said("pagebox")
        wrong += [f"{name}: the box at its head doesn't say {t!r}" for t in
                  ("You need", "You get", "Runs in") if t not in box]
        if not re.search(r"</h1>\s*<blockquote>", page.html):
            wrong.append(f"{name}: no subtitle under the title")
        if not any("sd-dropdown" in a.get("class", "") for a in page.all("details")):
            wrong.append(f"{name}: no folded solution")
    assert not wrong, "\n".join(wrong)


def test_site_is_light(pages):
    size = {f: f.stat().st_size for f in SITE.rglob("*") if f.is_file()}
    heavy = [str(f) for f in size if re.search("mathjax|fontawesome", str(f), re.I)]
    assert not heavy, f"formulas and icons need no script: {heavy}"
    images = {f.name: s for f, s in size.items() if "_images" in f.parts and s > 1e6}
    assert not images, f"pictures above 1 MB: {images}"


def test_every_icon_has_its_mask(pages):
    masks = set(re.findall(r"^\.(fa-[\w-]+) \{", (SITE / "_static" / "icons.css")
                           .read_text(), re.M))
    sizes = {"fa-lg", "fa-solid", "fa-brands", "fa-sm"}
    used = {name for page in pages.values() for tag in ("i", "span")
            for icon in page.all(tag) for name in icon.get("class", "").split()
            if name.startswith("fa-")}
    assert used - sizes - masks == set() and {"fa-bars", "fa-list"} <= used


def test_the_root_the_map_and_robots(pages):
    root = (SITE / "index.html").read_text()
    assert 'property="og:image"' in root and 'url=intro.html' in root
    told = set(re.findall(r"<loc>https://[\w.]+/stabbook/([\w/]+\.html)</loc>",
                          (SITE / "sitemap.xml").read_text()))
    assert told == pages.keys() - {"genindex.html", "search.html"}
    assert "This page is not in the book" in (SITE / "404.html").read_text()
    assert "sitemap.xml" in (SITE / "robots.txt").read_text()
    assert all(page.html.count('name="viewport"') == 1 for page in pages.values())


# ------------------------------------------------------------------ one palette

def css_colours():
    css = (ROOT / "book" / "_static" / "custom.css").read_text()
    return {name.replace("-", "_"): colour.upper() for name, colour in
            re.findall(r"--method-([\w-]+):\s*(#[0-9A-Fa-f]{6});", css)}


def test_plots_and_site_share_one_palette():
    from stabbook.methods import METHODS
    from stabbook.plots import PALETTE
    plots = {name: look[0].upper() for name, look in PALETTE.items()}
    assert plots == css_colours()
    assert set(plots) == set(METHODS)


# ------------------------------------------------------------------ in a browser

class Handler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args):
        pass


@pytest.fixture(scope="module")
def address(pages):
    "The site, served on localhost by a thread."
    handler = functools.partial(Handler, directory=SITE)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    thread.join()


@pytest.fixture(scope="module")
def browser():
    need(Path(CHROMIUM).exists(), "no Chromium: run `apt-get install chromium`")
    api = pytest.importorskip("playwright.sync_api")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=QUIET,
                                              timeout=PATIENCE)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def shared(browser):
    "One tab for all tests, so that scripts and fonts are fetched and compiled once."
    context = browser.new_context()
    context.set_default_timeout(PATIENCE)
    yield context.new_page()
    context.close()


@pytest.fixture
def tab(shared, address):
    """Called with a page's name, the tab on that page, as a new reader sees it."""
    def open_page(name, width=1440, theme="light"):
        shared.set_viewport_size({"width": width, "height": 900})
        shared.emulate_media(color_scheme=theme)
        shared.goto(address + name, wait_until="load")
        shared.evaluate(READY)
        return shared
    yield open_page
    shared.evaluate("try { localStorage.clear() } catch (error) {}")


READY = """async () => { await document.fonts.ready; }"""
LOOK = """() => ({
  math: document.querySelectorAll('article .math').length,
  rendered: [...document.querySelectorAll('article .math math')]
    .filter(e => e.getBoundingClientRect().width > 2).length,
  wrong: [...document.querySelectorAll('merror')].map(e => e.textContent),
  pictures: [...document.images].filter(i => !i.complete || !i.naturalWidth)
    .map(i => i.src),
})"""
SIDEWAYS = """() => {
  const root = document.scrollingElement, edge = root.clientWidth;
  if (root.scrollWidth <= edge) return null;
  const clipped = e => { for (let p = e.parentElement; p && p !== document.body;
    p = p.parentElement) if (getComputedStyle(p).overflowX !== 'visible') return true; };
  const wide = [...document.body.querySelectorAll('*')].filter(
    e => e.getBoundingClientRect().right > edge + 1 && !clipped(e)
      && getComputedStyle(e).position !== 'fixed');
  return `${root.scrollWidth} > ${edge} px: ` + wide.slice(-3).map(
    e => `<${e.localName} class="${e.className}">`).join(' ');
}"""


@pytest.fixture(scope="module")
def visits(pages, shared, address):
    "Each page opened once; what it complained of, asked for, and how wide it grew."
    seen, now = {}, {}
    listeners = {
        "console": lambda m: m.type in ("error", "warning")
        and now["complaints"].append(m.text),
        "pageerror": lambda e: now["complaints"].append(str(e)),
        "request": lambda r: now["requests"].append(r.url),
        "response": lambda r: r.status >= 400 and now["missing"].append(r.url),
    }
    for event, listener in listeners.items():
        shared.on(event, listener)
    for name in pages:
        now.update(complaints=[], requests=[], missing=[], sideways={})
        shared.set_viewport_size({"width": WIDTHS[0], "height": 800})
        shared.goto(address + name, wait_until="load")
        shared.evaluate(READY)
        for width in WIDTHS:
            shared.set_viewport_size({"width": width, "height": 800})
            now["sideways"][width] = shared.evaluate(SIDEWAYS)
        seen[name] = {**now, **shared.evaluate(LOOK)}
    for event, listener in listeners.items():
        shared.remove_listener(event, listener)
    return seen


def gather(visits, key):
    return "\n".join(f"{name}: {x}" for name, v in visits.items() for x in v[key])


def test_no_page_complains(visits):
    assert not gather(visits, "complaints"), gather(visits, "complaints")
    assert not gather(visits, "missing"), gather(visits, "missing")
    assert not gather(visits, "pictures"), gather(visits, "pictures")


def test_no_request_leaves_localhost(visits, address):
    away = {r for v in visits.values() for r in v["requests"]
            if not r.startswith((address, "data:", "blob:"))}
    assert not away, "\n".join(sorted(away))


@pytest.mark.parametrize("width", WIDTHS)
def test_no_page_scrolls_sideways(visits, width):
    wide = [f"{n}: {v['sideways'][width]}" for n, v in visits.items()
            if v["sideways"][width]]
    assert not wide, "\n".join(wide)


def test_math_renders(visits):
    assert any(v["math"] for v in visits.values()), "no page has any math"
    bare = [f"{n}: {v['rendered']} of {v['math']} formulas" for n, v in visits.items()
            if v["rendered"] < v["math"]]
    assert not bare and not gather(visits, "wrong"), bare or gather(visits, "wrong")


def samples(pages, wanted=2):
    "The pages with the most kinds of content."
    kinds = ("admonition", "<table", "<pre", "figcaption", "pagebox", "sd-dropdown")
    ranked = sorted(pages, key=lambda n: -sum(k in pages[n].html for k in kinds))
    return ranked[:wanted]


CONTRAST = """() => {
  const canvas = document.createElement('canvas').getContext('2d',
    {willReadFrequently: true});
  const rgba = colour => { canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = colour;
    canvas.fillRect(0, 0, 1, 1); return [...canvas.getImageData(0, 0, 1, 1).data]; };
  const over = (a, b) => { const t = a[3] / 255;
    return [0, 1, 2].map(i => a[i] * t + b[i] * (1 - t)).concat(255); };
  const ground = e => { const stack = [];
    for (; e; e = e.parentElement) stack.push(rgba(getComputedStyle(e).backgroundColor));
    return stack.reverse().reduce((under, c) => over(c, under), [255, 255, 255, 255]); };
  const light = c => { const [r, g, b] = c.slice(0, 3).map(v => (v /= 255) <= 0.03928
    ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
  document.querySelectorAll('article details').forEach(d => d.open = true);
  const worst = {}, kinds = {'body text': 'article p, article li', caption:
    'article figcaption, article caption', admonition: 'article .admonition',
    code: 'article pre', table: 'article td, article th', title: 'article h1, article h2',
    link: 'article a', label: '.admonition-title, .eyebrow, summary',
    sidebar: '.bd-sidebar-primary', contents: '.bd-sidebar-secondary',
    footer: 'footer'};
  for (const [kind, selector] of Object.entries(kinds))
    for (const box of document.querySelectorAll(selector)) {
      const walk = document.createTreeWalker(box, NodeFilter.SHOW_TEXT);
      for (let node = walk.nextNode(); node; node = walk.nextNode()) {
        const e = node.parentElement, style = getComputedStyle(e);
        if (!node.data.trim() || !e.checkVisibility({opacityProperty: true,
            visibilityProperty: true}) || e.closest('.headerlink'))
          continue;
        const under = ground(e), ink = over(rgba(style.color), under);
        const [a, b] = [light(ink), light(under)].sort((x, y) => y - x);
        const ratio = (a + 0.05) / (b + 0.05);
        if (!(kind in worst) || ratio < worst[kind].ratio)
          worst[kind] = {ratio, text: node.data.trim().slice(0, 30),
            where: e.localName + '.' + e.className, ink: style.color};
      }
    }
  return worst;
}"""


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_contrast_is_at_least_4_5(tab, pages, theme):
    seen, weak = set(), []
    for name in samples(pages):
        page = tab(name, theme=theme)
        assert page.evaluate("document.documentElement.dataset.theme") == theme
        worst = page.evaluate(CONTRAST)
        seen |= set(worst)
        weak += [f"{name}, {kind}: {w['ratio']:.2f} at {w['where']} {w['text']!r}"
                 for kind, w in worst.items() if w["ratio"] < 4.5]
    assert {"body text", "admonition", "code", "table", "title", "sidebar"} <= seen
    assert not weak, "\n".join(weak)


def test_dark_readers_see_no_flash_of_white(browser, address, pages):
    context = browser.new_context(color_scheme="dark")
    context.set_default_timeout(PATIENCE)
    page = context.new_page()
    page.add_init_script("""new MutationObserver((_, watch) => {
      if (!document.body) return;
      window.first = document.documentElement.dataset.theme; watch.disconnect();
    }).observe(document, {childList: true, subtree: true});""")
    page.goto(address + samples(pages)[0])
    assert page.evaluate("window.first") == "dark"
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert sum(map(int, re.findall(r"\d+", ground)[:3])) < 150
    for _ in range(3):
        page.locator("button.theme-switch-button:visible").click()
        if page.evaluate("document.documentElement.dataset.theme") == "light":
            break
    assert page.evaluate("document.documentElement.dataset.theme") == "light"
    page.reload()
    assert page.evaluate("window.first") == "light", "the reader's choice is forgotten"
    context.close()


def test_pictures_stand_on_white_in_the_dark(tab, pages):
    name = next((n for n, p in pages.items() if p.all("img", inside="figure")), None)
    need(name, "no page has a figure yet")
    style = tab(name, theme="dark").evaluate("""() => { const s = getComputedStyle(
      document.querySelector('figure img')); return [s.backgroundColor, s.filter]; }""")
    assert style == ["rgb(255, 255, 255)", "none"]


FOCUSED = """() => {
  const e = document.activeElement;
  if (!e || e === document.body) return null;
  const s = getComputedStyle(e), box = e.getBoundingClientRect();
  const ring = (s.outlineStyle !== 'none' && parseFloat(s.outlineWidth) >= 1)
    || s.boxShadow !== 'none' || e.matches('summary');
  return {what: e.localName + '.' + e.className, text: e.textContent.trim().slice(0, 40),
    href: e.getAttribute('href'), ring, inArticle: !!e.closest('article'),
    inNav: !!e.closest('nav.bd-links'), search: e.matches('[class*=search]'),
    header: !!e.closest('.bd-header-article'),
    shown: box.width > 0 && box.bottom > 0 && box.top < innerHeight};
}"""


def test_keyboard_alone_is_enough(tab, pages):
    page, stops = tab(samples(pages)[0]), []
    for _ in range(80):
        page.keyboard.press("Tab")
        if not stops:
            page.wait_for_timeout(300)                  # the skip link slides in
        stop = page.evaluate(FOCUSED)
        if stop is None:
            break
        stops.append(stop)
        if sum(s["inArticle"] for s in stops) > 8:
            break
    assert stops[0]["href"] == "#main-content" and stops[0]["shown"]
    for place in ("search", "inNav", "header", "inArticle"):
        assert any(s[place] for s in stops), f"Tab never reaches {place}"
    blind = [s for s in stops if not s["ring"] or not s["shown"]]
    assert not blind, f"focus is not visible: {json.dumps(blind, indent=1)}"


def test_skip_link_search_and_solutions_by_keyboard(tab, pages):
    name = next((n for n, p in pages.items() if "sd-dropdown" in p.html), None)
    need(name, "no page has a folded solution yet")
    page = tab(name, width=1280)
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    page.wait_for_url("**/*#main-content", timeout=5000)  # or it fails
    solution = page.locator("details.sd-dropdown").first
    solution.locator("summary").focus()
    page.keyboard.press("Enter")
    assert solution.evaluate("d => d.open")
    page.keyboard.press("Control+k")
    assert page.locator("#pst-search-dialog input").is_visible()
    page.keyboard.type("norm")
    page.keyboard.press("Enter")
    page.wait_for_url("**/search.html?q=norm*")
    page.wait_for_selector("#search-results li a")


def test_one_search_box(tab, pages):
    page, shown = tab(samples(pages)[0]), {}
    for width in (375, 800, 1024, 1280, 1440):
        page.set_viewport_size({"width": width, "height": 900})
        shown[width] = page.evaluate("""() => [...document.querySelectorAll(
          'button[class*=search-button]')].filter(e => { const b =
          e.getBoundingClientRect(); return e.checkVisibility({visibilityProperty: true})
          && b.right > 0 && b.left < innerWidth; }).length""")
    assert set(shown.values()) == {1}, shown


def test_contents_open_on_a_phone(tab, pages):
    page = tab(samples(pages)[0], width=375)
    link = page.locator("nav.bd-links a").nth(1)
    assert not link.is_visible()
    page.locator("button.primary-toggle").click()
    link.wait_for()
    link.click()
    page.wait_for_load_state()
    assert page.locator("article h1").is_visible()


def test_contents_fold_away_on_a_desk(tab, pages):
    page = tab(samples(pages)[0])
    box = page.locator("#pst-primary-sidebar")
    assert box.is_visible()
    page.locator("button.primary-toggle").click()
    box.wait_for(state="hidden")


def test_wide_tables_scroll_in_their_own_box(tab, chapters):
    with_tables = [n for n, p in chapters.items() if p.all("table", inside="article")]
    need(with_tables, "no page has a table yet")
    for name in samples({n: chapters[n] for n in with_tables}, 3):
        boxes = tab(name, width=375).evaluate("""() => [...document.querySelectorAll(
          'article table')].map(t => { for (let p = t.parentElement; p;
            p = p.parentElement) {
              if (/auto|scroll/.test(getComputedStyle(p).overflowX)) return true;
              if (p.matches('article')) return false; } })""")
        assert boxes and all(boxes), f"{name}: a table without a box to scroll in"


def test_site_is_not_an_empty_shell(pages):
    "The redirect at the front leads to the first page."
    front = SITE / "index.html"
    root = re.search(r"^root:\s*(\S+)", (ROOT / "_toc.yml").read_text(), re.M)[1]
    assert front.exists() and (f"{root}.html" in front.read_text() or root == "index")
    assert len(pages) >= 10
