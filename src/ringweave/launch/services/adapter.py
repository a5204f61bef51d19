"""The reference adapter: any service of this machine, served by the remote protocol of docs/services.md.

    python -m ringweave.launch.services.adapter --on local --port 8470 --token-file FILE

It serves at 127.0.0.1, without TLS: put a proxy that ends TLS before it to be reached from elsewhere. Whoever has the
token is taken for the user who runs the adapter. Scripts without a directory start in that user's home folder.
"""

import hmac
import json
import os
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import click

from ringweave.errors import JobError, RingweaveError, UnknownJobError, UsageError, explain
from ringweave.files import json_text
from ringweave.jobs.life import verbs
from ringweave.jobs.requests import job_file
from ringweave.launch.services import finding, views
from ringweave.launch.services.service import LogQuery, Service

MAX_BYTES = 4 * 2**20
"""Of a request."""


class Adapter(ThreadingHTTPServer):
    """Answers for a service until it is shut down."""

    daemon_threads = True

    def __init__(self, service: Service, token: str, port: int = 0) -> None:
        """`port` 0 takes a free one; it is `server_port` then."""
        self.service, self.token = service, token
        super().__init__(("127.0.0.1", port), _Handler)


class _Handler(BaseHTTPRequestHandler):
    timeout = 60

    @property
    def _adapter(self) -> Adapter:
        assert isinstance(self.server, Adapter)
        return self.server

    def do_GET(self) -> None:
        self._answer("GET")

    def do_POST(self) -> None:
        self._answer("POST")

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: whoever asks sees the answer."""

    def _answer(self, method: str) -> None:
        given = self.headers.get("Authorization", "")
        if not hmac.compare_digest(given.encode(), f"Bearer {self._adapter.token}".encode()):
            do = "Set RINGWEAVE_SERVICE_TOKEN_FILE to a file with the adapter's token"
            self._send(401, {"error": explain("token", got="another one", expected="the adapter's", do=do)})
            return
        try:
            self._route(method)
        except UnknownJobError as error:
            self._send(404, {"error": str(error)})
        except UsageError as error:
            self._send(409, {"error": str(error)})
        except RingweaveError as error:
            self._send(502, {"error": str(error)})

    def _route(self, method: str) -> None:
        parts = urlsplit(self.path)
        words = [unquote(word) for word in parts.path.strip("/").split("/")]
        service = self._adapter.service
        match method, *words:
            case "GET", "v1", "jobs":
                self._send(200, {"jobs": [views.document(job) for job in service.jobs()]})
            case "POST", "v1", "jobs":
                self._send(200, self._submit(self._body()))
            case "GET", "v1", "jobs", name:
                self._send(200, views.document(service.job(name)))
            case "GET", "v1", "jobs", name, "logs":
                self._stream(name, parse_qs(parts.query))
            case "POST", "v1", "jobs", name, verb if verb in verbs.NAMES:
                self._send(200, views.document(service.act(name, verb)))
            case _:
                do = "See docs/services.md"
                got = f"{method} {parts.path}"
                self._send(400, {"error": explain("request", got=got, expected="one of the protocol's", do=do)})

    def _submit(self, body: dict[str, Any]) -> dict[str, Any]:
        request = job_file.loads(str(body.get("request", "")), source="request")
        text = body.get("script_text")
        if request.directory is None and not isinstance(text, str):
            do = "Send the script's text, or give the folder that it is in as directory"
            raise JobError(explain("script_text", got=text, expected="the text of the script", do=do))
        is_dry = bool(body.get("dry_run"))
        made = self._adapter.service.submit(request, base=Path.home(), script_text=text, dry_run=is_dry)
        return {"job": views.document(made.job), "objects": [asdict(each) for each in made.objects]}

    def _body(self) -> dict[str, Any]:
        given = self.headers.get("Content-Length") or "0"
        length = int(given) if given.isascii() and given.isdecimal() and len(given) < 20 else -1
        if not 0 <= length <= MAX_BYTES:
            do = "Put what the script needs beside it, and give that folder as directory"
            raise JobError(explain("bytes of the request", got=given, expected=f"at most {MAX_BYTES}", do=do))
        try:
            body = json_text.loads(self.rfile.read(length), MAX_BYTES)
        except ValueError as error:
            raise JobError(explain("request", got=str(error), expected="JSON", do="See docs/services.md")) from error
        return body if isinstance(body, dict) else {}

    def _stream(self, name: str, query: dict[str, list[str]]) -> None:
        def number(key: str) -> int | None:
            try:
                return int(query[key][0]) if key in query else None
            except ValueError as error:
                do = "Leave it out for all"
                raise JobError(explain(key, got=query[key][0], expected="a whole number", do=do)) from error

        which = LogQuery(
            node=query.get("node", [None])[0],
            rank=number("rank"),
            attempt=number("attempt"),
            follow=query.get("follow") == ["1"],
        )
        lines = self._adapter.service.logs(name, which)
        self.send_response(200)
        self.send_header("Content-Type", "application/x-ndjson")
        self.end_headers()
        for line in lines:
            self.wfile.write(json.dumps(asdict(line)).encode() + b"\n")

    def _send(self, status: int, content: dict[str, Any]) -> None:
        text = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)


@click.command
@click.option("--on", "place", default="local", show_default=True, help="The service that is served.")
@click.option("--port", type=click.IntRange(0, 65535), default=8470, show_default=True)
@click.option("--token-file", required=True, type=click.Path(exists=True, dir_okay=False), help="Holds the token.")
def main(place: str, port: int, token_file: str) -> None:
    """Serve a service until interrupted."""
    token = Path(token_file).read_text(encoding="utf-8").strip()
    with Adapter(finding.open_service(place, os.environ), token, port) as adapter:
        click.echo(f"serving {place} at http://127.0.0.1:{adapter.server_port}")
        adapter.serve_forever()


if __name__ == "__main__":
    main()
