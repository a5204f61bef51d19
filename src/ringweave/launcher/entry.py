"""First program of a Python worker of an elastic run: runs its script as `python SCRIPT` does, and keeps how it ends.

The interpreter keeps nothing of `raise SystemExit(1)` or `exit(1)`: an exit handler could not tell such a script from
one that has finished, and the other workers would hear that the training is done. So its status is kept in
`sys.last_value`, like an exception. It runs as a script, so it imports nothing of ringweave.
"""

import importlib.machinery
import runpy
import sys
import types
from pathlib import Path
from typing import Any

_COMPILED_SUFFIXES = (".pyc", ".pyz")


def main(command_words: list[str]) -> Any:
    """Run `SCRIPT ARGUMENT..` or `-m MODULE ARGUMENT..`; the caller has to keep the returned namespace alive.

    The script's own `__main__` replaces this file's, and stays.
    """
    is_module = command_words[0] == "-m"
    target, *arguments = command_words[1:] if is_module else command_words
    sys.argv = [target, *arguments]
    set_search_path(target, is_module=is_module)
    try:
        if is_module:
            return runpy.run_module(target, run_name="__main__", alter_sys=True)
        if target.endswith(_COMPILED_SUFFIXES):
            return runpy.run_path(target, run_name="__main__")
        return _run_source(str(Path(target).absolute()))
    except SystemExit as leaving:
        if leaving.code not in (None, 0):
            sys.last_value = leaving
        raise


def set_search_path(target: str, *, is_module: bool) -> None:
    """Put the folder first in which the script's own modules are found."""
    if not sys.flags.safe_path:
        sys.path[0] = str(Path.cwd() if is_module else Path(target).resolve().parent)


def _run_source(path: str) -> types.ModuleType:
    loader = importlib.machinery.SourceFileLoader("__main__", path)
    code = loader.source_to_code(loader.get_data(path), path)
    script = types.ModuleType("__main__")
    script.__dict__.update(__file__=path, __loader__=loader, __cached__=None)
    sys.modules["__main__"] = script
    exec(code, script.__dict__)  # noqa: S102 - what the interpreter does with a script
    return script


if __name__ == "__main__":
    kept = main(sys.argv[1:])
