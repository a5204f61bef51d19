"""The reference adapter, run in a thread."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from ringweave.platforms.api import Platform
from ringweave.platforms.remote_adapter import RemoteAdapter

TOKEN = "secret"


@contextmanager
def served(service: Platform) -> Iterator[RemoteAdapter]:
    with RemoteAdapter(service, TOKEN) as adapter:
        thread = threading.Thread(target=adapter.serve_forever)
        thread.start()
        yield adapter
        adapter.shutdown()
        thread.join()
