"""The fake API server running: in a thread of its own, at a port of this machine, with kubeconfigs for its users."""

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

from ringweave.launch.kubernetes.api import certificates
from ringweave.testing.kubernetes.checks.users import MASTERS
from ringweave.testing.kubernetes.server.api import Api
from ringweave.testing.kubernetes.server.http import Handler

_Result = TypeVar("_Result")
_SOON_S = 250.0


class FakeCluster:
    """An API server while the context lasts."""

    def __init__(self, *, bookmark_s: float = 30.0) -> None:
        """`bookmark_s`: seconds of silence on a watch after which it gets a bookmark."""
        self.api = Api()
        self.handler = Handler(self.api, bookmark_s=bookmark_s)
        self.url = ""
        # Over plain HTTP kubectl shows nobody a token.
        self._certificate = certificates.issue(["127.0.0.1"], datetime.now(UTC))
        self.loop = asyncio.new_event_loop()
        """Of the server; only there may objects be changed."""
        self._thread = threading.Thread(target=self._serve, name="fake-api-server", daemon=True)
        self._started = threading.Event()
        self._stop = asyncio.Event()

    def __enter__(self) -> "FakeCluster":
        self._thread.start()
        if not self._started.wait(_SOON_S):
            raise RuntimeError("the fake API server does not start")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(_SOON_S)

    def call(self, function: Callable[..., _Result], *arguments: Any) -> _Result:
        """Run a function where the objects are changed, between two requests."""

        async def run() -> _Result:
            return function(*arguments)

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(_SOON_S)

    def cut_watches(self) -> None:
        """End every watch, and forget what they could go on from; to be called by `call`."""
        self.api.store.compact()
        self.handler.cut.set()
        self.handler.cut = asyncio.Event()

    def kubeconfig(self, path: Path, *, user: str = "admin", groups: tuple[str, ...] = (MASTERS,)) -> Path:
        """A kubeconfig of somebody, by default of one who may do everything."""
        token = self.call(self.api.users.add, user, *groups)
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
        site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=self._certificate.context())
        await site.start()
        self.url = f"https://127.0.0.1:{runner.addresses[0][1]}"
        self._started.set()
        await self._stop.wait()
        await runner.cleanup()
