"""What an operator says of itself over HTTP: that it lives, and the metrics of all jobs that it leads."""

import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from urllib.parse import urlsplit

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST

from ringweave.errors import RingweaveError
from ringweave.launch.kubernetes import names, showing
from ringweave.launch.kubernetes.api import kinds
from ringweave.launch.kubernetes.api.client import Client
from ringweave.launch.services import metrics
from ringweave.launch.services.views import JobView


@contextlib.asynccontextmanager
async def exposed(url: str | None, client: Client, namespaces: Sequence[str]) -> AsyncIterator[None]:
    """Answer while the context lasts: from the start, since one that waits for the lease lives as well.

    Args:
        url: Where to say that it lives; its metrics are at `/metrics` beside that. None: nowhere.
        client: For the metrics, which are looked up anew for every request.
        namespaces: Whose jobs; empty: those of all.
    """
    if url is None:
        yield
        return

    async def live(_: web.Request) -> web.Response:
        return web.Response(text="ok")

    async def tell(_: web.Request) -> web.Response:
        try:
            text = metrics.text_of(await _jobs(client, namespaces))
        except RingweaveError as error:
            return web.Response(status=503, text=f"{error}\n")
        return web.Response(body=text.encode(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    place = urlsplit(url)
    app = web.Application()
    app.router.add_get(place.path or "/", live)
    app.router.add_get("/metrics", tell)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, place.hostname, place.port or 80).start()
        yield
    finally:
        await runner.cleanup()


async def _jobs(client: Client, namespaces: Sequence[str]) -> list[JobView]:
    """All of them; the place of each has its namespace, in which alone its name is unique."""
    views = []
    for namespace in namespaces or (None,):
        for resource in await client.list(kinds.TRAINING_JOBS, namespace):
            place = f"{names.PLACE}/{resource['metadata']['namespace']}"
            views.append(replace(showing.view(resource, time.time()), place=place))
    return views
