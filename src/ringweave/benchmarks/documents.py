"""Documents that an earlier benchmark wrote, read back."""

from typing import Any

from ringweave.errors import UsageError, explain
from ringweave.files import json_text

_KEYS = ("cluster", "results")
_RESULT_KEYS = ("system", "bytes", "median_s", "iqr_s", "fraction_of_bound", "order")


def load(path: str) -> dict[str, Any]:
    """The document of a file.

    Raises:
        UsageError: It cannot be read, or is not such a document.
    """
    try:
        document = json_text.load(path)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else type(error).__name__
        raise UsageError(_refusal(path, reason)) from error
    if not isinstance(document, dict) or any(key not in document for key in _KEYS):
        raise UsageError(_refusal(path, "another document"))
    if not document["results"] or any(key not in result for result in document["results"] for key in _RESULT_KEYS):
        raise UsageError(_refusal(path, "a document without results"))
    return document


def _refusal(path: str, got: str) -> str:
    expected = "a JSON document that `ringweave bench allreduce --out` wrote"
    return explain("result of a benchmark", got=got, expected=expected, do="Give such files", where=path)
