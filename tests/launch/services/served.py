"""The reference adapter, run in a thread."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from ringweave.launch.services.adapter import Adapter
from ringweave.launch.services.service import Service

TOKEN = "secret"


@contextmanager
def served(service: Service) -> Iterator[Adapter]:
    with Adapter(service, TOKEN) as adapter:
        thread = threading.Thread(target=adapter.serve_forever)
        thread.start()
        yield adapter
        adapter.shutdown()
        thread.join()
