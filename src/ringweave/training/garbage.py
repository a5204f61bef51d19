"""Python's garbage collections, in the midst of a step that all others wait in."""

import gc


def spare_collections() -> None:
    """Leave what is there by now out of garbage collections from here on.

    A whole one goes through the objects of all modules: a tenth of a second of a processor with torch. Who has a
    twentieth of one takes two seconds, in the midst of a step that all others wait in (docs/decisions/0064). This call
    makes one: before a worker has to give signs of life, since none come meanwhile.
    """
    gc.collect()
    gc.freeze()
