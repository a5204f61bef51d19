"""Fake API server in a thread of its own, on a local port, with kubeconfigs for its users."""

import asyncio
import base64
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from aiohttp import web
from ruamel.yaml import YAML

from ringweave.platforms.kubernetes import agent_gateway
from tests.fakes.kubernetes.api import FakeApi
from tests.fakes.kubernetes.http_server import ApiHandler
from tests.fakes.kubernetes.users import MASTERS_GROUP

_Result = TypeVar("_Result")
_START_TIMEOUT_S = 250.0


class FakeCluster:
    """Fake API server; a context manager."""

    def __init__(self, *, bookmark_s: float = 30.0) -> None:
        """`bookmark_s`: seconds without events after which a watch gets a bookmark."""
        self.api = FakeApi()
        self.handler = ApiHandler(self.api, bookmark_s=bookmark_s)
        self.url = ""
        # Over plain HTTP kubectl sends no token.
        self._certificate = agent_gateway.issue_certificate(["127.0.0.1"], datetime.now(UTC))
        self.loop = asyncio.new_event_loop()
        """Event loop of the server; objects may be changed only in it."""
        self._thread = threading.Thread(target=self._serve, name="fake-api-server", daemon=True)
        self._started = threading.Event()
        self._stop = asyncio.Event()

    def __enter__(self) -> "FakeCluster":
        self._thread.start()
        if not self._started.wait(_START_TIMEOUT_S):
            raise RuntimeError("the fake API server does not start")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(_START_TIMEOUT_S)

    def call(self, function: Callable[..., _Result], *arguments: Any) -> _Result:
        """Run a function in the server's event loop, between two requests."""

        async def run() -> _Result:
            return function(*arguments)

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(_START_TIMEOUT_S)

    def cut_watches(self) -> None:
        """End all watches and drop their history. Call it through `call`."""
        self.api.store.compact()
        self.handler.watches_cut.set()
        self.handler.watches_cut = asyncio.Event()

    def kubeconfig(self, path: Path, *, user: str = "admin", groups: tuple[str, ...] = (MASTERS_GROUP,)) -> Path:
        """Write a kubeconfig of a user, by default of an administrator."""
        token = self.call(self.api.users.add_token, user, *groups)
        authority = base64.b64encode(self._certificate.certificate.encode()).decode()
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "fake",
            "contexts": [{"name": "fake", "context": {"cluster": "fake", "user": user, "namespace": "default"}}],
            "clusters": [{"name": "fake", "cluster": {"server": self.url, "certificate-authority-data": authority}}],
            "users": [{"name": user, "user": {"token": token}}],
        }
        with path.open("w", encoding="utf-8") as file:
            YAML(typ="safe", pure=True).dump(config, file)
        path.chmod(0o600)
        return path

    def _serve(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_until_complete(self._run())
            left = asyncio.all_tasks(self.loop)
            for task in left:
                task.cancel()
            self.loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        finally:
            self.loop.close()

    async def _run(self) -> None:
        runner = web.AppRunner(self.handler.app(), access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=self._certificate.ssl_context())
        await site.start()
        self.url = f"https://127.0.0.1:{runner.addresses[0][1]}"
        self._started.set()
        await self._stop.wait()
        await runner.cleanup()
