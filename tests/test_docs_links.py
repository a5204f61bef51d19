"""The hook of the documentation site: links out of docs/ become text, all others stay for the strict build to judge."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]


def load_hook() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_links", ROOT / "tools/docs_links.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


HOOK = load_hook()


@pytest.mark.parametrize(
    ("link", "shown"),
    [
        ("[the\nMakefile's target](../../Makefile#docs)", "the\nMakefile's target (`Makefile`)"),
        ("[`Makefile`](../../Makefile)", "`Makefile`"),
        ("[CHANGELOG.md](../../CHANGELOG.md)", "`CHANGELOG.md`"),
    ],
)
def test_a_link_out_of_the_site_becomes_text(link: str, shown: str) -> None:
    assert HOOK.replace_links(f"See {link}.", "how-to/page.md") == f"See {shown}."


@pytest.mark.parametrize(
    "text",
    [
        "[a page](../index.md)",
        "[a missing page](no-such-page.md)",
        "[a missing file](../../no-such-file)",
        "[outside of the repository](../../../other)",
        "[an anchor](#here)",
        "[elsewhere](https://example.org/Makefile)",
        "![a picture](../../Makefile)",
        "```\n[code](../../Makefile)\n```",
    ],
)
def test_every_other_link_stays(text: str) -> None:
    assert HOOK.replace_links(text, "how-to/page.md") == text
