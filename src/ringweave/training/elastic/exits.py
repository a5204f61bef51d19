"""Whether the script has failed, when its process ends: what the others hear then depends on it."""

import sys
from typing import Any, NoReturn


def watch() -> None:
    """Keep a failure by `sys.exit` where the interpreter keeps the exception that ends a script: in `sys.last_value`.

    Of a SystemExit the interpreter keeps nothing, and what runs at its end could not tell it from a script that is
    through. `launch/elastic/entry.py` sees each SystemExit that ends a script; this is for those that it does not run
    (`ringweave run --elastic 3:8 -- python train.py`), where `raise SystemExit(1)` goes unnoticed until the slot has
    another process. A script that catches its own `sys.exit(1)` and goes on is taken for failed all the same; then the
    others end their training as after a death.
    """
    leave = sys.exit

    def noted(status: Any = None, /) -> NoReturn:
        if status not in (None, 0):
            sys.last_value = SystemExit(status)
        leave(status)

    sys.exit = noted


def has_failed() -> bool:
    """An exception or `sys.exit` has ended the script, and not in good order."""
    return getattr(sys, "last_value", None) is not None
