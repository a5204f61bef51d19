"""Reference adapter: serves any platform of this machine by the remote protocol of docs/how-to/write-a-platform.md.

    python -m ringweave.platforms.remote_adapter --on local --port 8470 --token-file FILE

It serves at 127.0.0.1, without TLS: put a proxy that terminates TLS before it, to reach it from elsewhere. A client
with the token acts as the user who runs the adapter. Scripts without a directory start in that user's home folder.
"""

import hmac
import json
import os
import re
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import click

from ringweave import __version__
from ringweave.errors import JobError, RingweaveError, UnknownJobError, UsageError, explain
from ringweave.files import file_io
from ringweave.http_servers import ThreadedHttpServer
from ringweave.jobs import admission
from ringweave.jobs import request as jobs_request
from ringweave.platforms import api, registry
from ringweave.platforms.api import LogQuery, Platform

MAX_REQUEST_BYTES = 4 * 2**20
"""Upper limit of a request."""


class RemoteAdapter(ThreadedHttpServer):
    """HTTP server that answers for a platform until it is shut down."""

    def __init__(self, service: Platform, token: str, port: int = 0) -> None:
        """`port` 0 chooses a free port; `server_port` names it."""
        self.platform, self.token = service, token
        super().__init__(("127.0.0.1", port), _AdapterHandler)


class _AdapterHandler(BaseHTTPRequestHandler):
    timeout = 60

    @property
    def _adapter(self) -> RemoteAdapter:
        assert isinstance(self.server, RemoteAdapter)
        return self.server

    def do_GET(self) -> None:
        self._handle("GET")

    def do_POST(self) -> None:
        self._handle("POST")

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing: the client sees the answer."""

    def _handle(self, method: str) -> None:
        given = self.headers.get("Authorization", "")
        if not hmac.compare_digest(given.encode(), f"Bearer {self._adapter.token}".encode()):
            do = "Set RINGWEAVE_SERVICE_TOKEN_FILE to a file with the adapter's token"
            self._send_json(401, {"error": explain("token", got="another one", expected="the adapter's", do=do)})
            return
        self._adapter.admit(self.connection)
        try:
            self._route(method)
        except UnknownJobError as error:
            self._send_json(404, {"error": str(error)})
        except UsageError as error:
            self._send_json(409, {"error": str(error)})
        except RingweaveError as error:
            self._send_json(502, {"error": str(error)})

    def _route(self, method: str) -> None:
        parts = urlsplit(self.path)
        words = [unquote(word) for word in parts.path.strip("/").split("/")]
        platform = self._adapter.platform
        match method, *words:
            case "GET", "v2", "jobs":
                self._send_json(200, {"jobs": [api.job_view_document(job) for job in platform.jobs()]})
            case "POST", "v2", "jobs":
                self._send_json(200, self._submit(self._read_body()))
            case "GET", "v2", "jobs", name:
                self._send_json(200, api.job_view_document(platform.job(name)))
            case "GET", "v2", "jobs", name, "logs":
                self._send_logs(name, parse_qs(parts.query))
            case "POST", "v2", "jobs", name, verb if verb in admission.VERB_NAMES:
                self._send_json(200, api.job_view_document(platform.act(name, verb)))
            case _, version, *_ if re.fullmatch(r"v\d{1,9}", version) and version != "v2":
                do = "Use a ringweave of the same protocol on both ends"
                expected = f"v2, which ringweave {__version__} serves here"
                self._send_json(
                    400, {"error": explain("protocol of the request", got=version, expected=expected, do=do)}
                )
            case _:
                do = "See docs/how-to/write-a-platform.md"
                got = f"{method} {parts.path}"
                self._send_json(400, {"error": explain("request", got=got, expected="one of the protocol's", do=do)})

    def _submit(self, body: dict[str, Any]) -> dict[str, Any]:
        request = jobs_request.parse_request(str(body.get("request", "")), source="request")
        text = body.get("script_text")
        if request.script is not None and request.directory is None and not isinstance(text, str):
            do = "Send the script's text, or give the folder that it is in as directory"
            raise JobError("script_text", got=text, expected="the text of the script", do=do)
        is_dry = bool(body.get("dry_run"))
        submission = self._adapter.platform.submit(request, base=Path.home(), script_text=text, dry_run=is_dry)
        return {"job": api.job_view_document(submission.job), "objects": [asdict(each) for each in submission.objects]}

    def _read_body(self) -> dict[str, Any]:
        given = self.headers.get("Content-Length") or "0"
        length = int(given) if given.isascii() and given.isdecimal() and len(given) < 20 else -1
        if not 0 <= length <= MAX_REQUEST_BYTES:
            do = "Put the files of the script into one folder, and give that folder as directory"
            raise JobError("bytes of the request", got=given, expected=f"at most {MAX_REQUEST_BYTES}", do=do)
        try:
            body = file_io.parse_json(self.rfile.read(length), MAX_REQUEST_BYTES)
        except ValueError as error:
            raise JobError(
                "request", got=str(error), expected="JSON", do="See docs/how-to/write-a-platform.md"
            ) from error
        return body if isinstance(body, dict) else {}

    def _send_logs(self, name: str, query: dict[str, list[str]]) -> None:
        def number(key: str) -> int | None:
            try:
                return int(query[key][0]) if key in query else None
            except ValueError as error:
                do = "Leave it out for all"
                raise JobError(key, got=query[key][0], expected="a whole number", do=do) from error

        events = query.get("events", ["none"])[0]
        if events not in api.LOG_FILES:
            expected = f"one of {', '.join(api.LOG_FILES)}"
            raise JobError("events", got=events, expected=expected, do="Leave it out for none")
        which = LogQuery(
            node=query.get("node", [None])[0],
            rank=number("rank"),
            attempt=number("attempt"),
            follow=query.get("follow") == ["1"],
            events=events,
        )
        lines = self._adapter.platform.logs(name, which)
        self.send_response(200)
        self.send_header("Content-Type", "application/x-ndjson")
        self.end_headers()
        for line in lines:
            self.wfile.write(json.dumps(asdict(line)).encode() + b"\n")

    def _send_json(self, status: int, content: dict[str, Any]) -> None:
        text = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)


@click.command
@click.option("--on", "place", default="local", show_default=True, help="Platform to serve.")
@click.option("--port", type=click.IntRange(0, 65535), default=8470, show_default=True)
@click.option("--token-file", required=True, type=click.Path(exists=True, dir_okay=False), help="File with the token.")
def main(place: str, port: int, token_file: str) -> None:
    """Serve a service until interrupted."""
    token = Path(token_file).read_text(encoding="utf-8").strip()
    with RemoteAdapter(registry.open_platform(place, os.environ), token, port) as adapter:
        click.echo(f"serving {place} at http://127.0.0.1:{adapter.server_port}")
        adapter.serve_forever()


if __name__ == "__main__":
    main()
