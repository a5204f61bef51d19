"""What is wrong with text of another member, in words."""

import pydantic


def in_words(error: pydantic.ValidationError) -> str:
    """Where it is wrong first, and how; without what it was."""
    first = error.errors(include_url=False, include_input=False)[0]
    where = ".".join(map(str, first["loc"])) or "all of it"
    return f"{where}: {first['msg']}"
