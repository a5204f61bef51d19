"""The page as one HTML file, which works from a disk and without a network: styles, scripts and data are inside."""

import base64
import hashlib
import re
from collections.abc import Mapping
from importlib import resources

PAGE = "page.html"
STATIC_FILES = {
    "page.css": "text/css",
    "uPlot.min.css": "text/css",
    "uPlot.iife.min.js": "text/javascript",
    "charts.js": "text/javascript",
    "drawings.js": "text/javascript",
    "page.js": "text/javascript",
}
"""Files that the page names, with their media types."""
_STYLE = re.compile(r'<link rel="stylesheet" href="static/([\w.]+)">')
_SCRIPT = re.compile(r'<script src="static/([\w.]+)"></script>')
_POLICY = (
    "default-src 'none'; script-src {scripts}; style-src {styles}; img-src data:; base-uri 'none'; form-action 'none'"
)


def static_text(name: str) -> str:
    """Return the text of a file of the page."""
    return (resources.files("ringweave.page") / "static" / name).read_text(encoding="utf-8")


def report_html(sections: Mapping[str, str], preface: str = "") -> str:
    """Return the whole report.

    Args:
        sections: Name -> JSON text without `<`, as of `run_model.dump_sections`.
        preface: HTML that comes before all sections. The page's policy takes no script, style or file of it.
    """
    data = ",".join(f'"{name}":{text}' for name, text in sections.items())
    page = static_text(PAGE)
    styles, scripts = ({name: static_text(name) for name in pattern.findall(page)} for pattern in (_STYLE, _SCRIPT))
    sources = [" ".join(map(_hash_source, each.values())) for each in (scripts, styles)]
    policy = _POLICY.format(scripts=sources[0], styles=sources[1])
    page = _STYLE.sub(lambda match: f"<style>{styles[match.group(1)]}</style>", page)
    page = _SCRIPT.sub(lambda match: f"<script>{scripts[match.group(1)]}</script>", page)
    page = page.replace("<title>", f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n<title>', 1)
    page = page.replace("<!-- data -->", f'<script type="application/json" id="data">{{{data}}}</script>', 1)
    return page.replace("<!-- preface -->", preface, 1)


def _hash_source(text: str) -> str:
    """Return the source expression of an inline style or script (Content Security Policy, level 3)."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
