"""Formulas become MathML while the site is built, so no page needs a script for them.

Every browser of today draws MathML; the font (STIX Two Math, `_static/fonts`) is ours.
"""
import re

from docutils import nodes
from latex2mathml.converter import convert
from latex2mathml.exceptions import MissingSuperScriptOrSubscriptError
from sphinx.errors import ExtensionError
from sphinx.util.math import get_node_equation_number

ROWS = {"aligned": "align*", "split": "align*"}  # Environments that it reads otherwise
LETTER = re.compile(r'<mi mathvariant="normal">([A-Za-z])</mi>')
WORD = re.compile(f"(?:{LETTER.pattern.replace('(', '(?:')}){{2,}}")
BOLD = re.compile(r'<mi mathvariant="bold-italic">&#x(003[BC][0-9A-F]);</mi>')


def readable(latex: str) -> str:
    "A formula with the environments that the converter knows."
    for name, other in ROWS.items():
        latex = latex.replace(f"{{{name}}}", f"{{{other}}}")
    latex = latex.replace(r"\begin{gathered}", r"\begin{array}{c}")
    latex = latex.replace(r"\end{gathered}", r"\end{array}")
    return re.sub(r"\\\\\[[\w.]+\]", r"\\\\", latex.strip())


def mathml(latex: str, display: str) -> str:
    "One formula as MathML; a formula that can't be read stops the build."
    try:
        made = convert(readable(latex), display=display)
        if "<mi>&</mi>" in made or "linebreak" in made:
            raise ValueError("rows outside of an environment that has rows")
        # A word is one identifier; MathML Core has letters for bold, no attribute.
        made = WORD.sub(lambda m: f"<mi>{''.join(LETTER.findall(m[0]))}</mi>", made)
        return BOLD.sub(lambda m: f"<mi>{chr(int(m[1], 16) - 0x3B1 + 0x1D736)}</mi>",
                        made)
    except (MissingSuperScriptOrSubscriptError, ValueError, IndexError, KeyError) as e:
        raise ExtensionError(f"formula {latex!r}: {type(e).__name__} {e}") from e


def inline(self, node: nodes.math) -> None:
    self.body.append(f'<span class="math">{mathml(node.astext(), "inline")}</span>')
    raise nodes.SkipNode


def block(self, node: nodes.math_block) -> None:
    self.body.append(self.starttag(node, "div", CLASS="math"))
    if node["number"]:
        number = get_node_equation_number(self, node)
        self.body.append(f'<span class="eqno">({number})')
        self.add_permalink_ref(node, "Link to this equation")
        self.body.append("</span>")
    self.body.append(mathml(node.astext(), "block") + "</div>\n")
    raise nodes.SkipNode


def setup(app) -> dict:
    app.add_html_math_renderer("mathml", (inline, None), (block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
