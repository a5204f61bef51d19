"""Hook of mkdocs: a link from a page to a file that is not in the site becomes plain text with the file's path.

Pages link to code, results and the notebook by relative paths, which work in the repository. The site has none of these
files. A link to a file that does not exist stays as it is, so that the strict build reports it.
"""

import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
DOCS = "docs"
NOT_IN_SITE = f"{DOCS}/notebook"

_LINK = re.compile(r"(?<!!)\[(?P<text>[^\]\[]*)\]\((?P<target>(?!https?:|mailto:|#)[^)\s]+)\)")
_FENCED = re.compile(r"(^ *```.*?^ *```[^\n]*$)", re.DOTALL | re.MULTILINE)


def is_in_site(path: str) -> bool:
    """Return whether a path of the repository belongs to the site."""
    return path.startswith(f"{DOCS}/") and not path.startswith(f"{NOT_IN_SITE}/")


def replace_links(markdown: str, page: str) -> str:
    """Return the page with its links to existing files outside of the site replaced by text.

    Args:
        markdown: Source of the page.
        page: Its path below docs/.
    """

    def replace(link: re.Match[str]) -> str:
        target = link["target"].partition("#")[0]
        path = posixpath.normpath(posixpath.join(DOCS, posixpath.dirname(page), target))
        if not target or is_in_site(path) or path.startswith("..") or not (ROOT / path).exists():
            return link[0]
        text = link["text"]
        return f"`{path}`" if text.strip("`") in {path, posixpath.basename(path)} else f"{text} (`{path}`)"

    parts = _FENCED.split(markdown)  # every second one is code
    return "".join(part if index % 2 else _LINK.sub(replace, part) for index, part in enumerate(parts))


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Replace the links of one page; mkdocs calls this."""
    return replace_links(markdown, page.file.src_uri)
