"""A service elsewhere, by HTTP and JSON; the protocol is in docs/services.md. `--on http://HOST:PORT` or `https://...`."""

import http.client
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote, urlencode, urlsplit

from pydantic import TypeAdapter

from ringweave.errors import JobError, LaunchError, RingweaveError, UnknownJobError, UsageError, explain
from ringweave.files import json_text
from ringweave.jobs.requests.request import Request
from ringweave.launch.services import submitting, views
from ringweave.launch.services.service import LogLine, LogQuery, Rendered, Service, Submission
from ringweave.launch.services.views import JobView

PREFIX = "/v1/jobs"
TOKEN_FILE = "RINGWEAVE_SERVICE_TOKEN_FILE"
"""Variable with the path of a file that holds the bearer token, by which the adapter knows who asks."""
TIMEOUT_S = 60.0
"""For an answer to begin; logs that are followed may be silent longer, and are not bounded once they have begun."""
MAX_BYTES = 256 * 2**20
"""Of an answer."""
MAX_LINE_BYTES = 16 * 2**20
"""Of a line of a log, with what is said of it."""

_Found = TypeVar("_Found")


class RemoteService(Service):
    """Passes every question on; what it answers is the adapter's word."""

    def __init__(self, address: str, token: str | None = None) -> None:
        """`address` is `http://HOST:PORT` or `https://HOST:PORT`.

        Raises:
            UsageError: It is not.
        """
        parts = urlsplit(address)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.path.strip("/"):
            do = "Write it like https://jobs.example:8443"
            raise UsageError(explain("service", got=address, expected="http(s)://HOST:PORT", do=do, where="--on"))
        self._address, self._parts, self._token = address, parts, token

    def submit(
        self, request: Request, *, base: Path, script_text: str | None = None, dry_run: bool = False
    ) -> Submission:
        """Pass the request on; a script that is alone travels with it, a directory has to be there."""
        if request.directory is None:
            script_text = submitting.script_of(request, base, script_text)
        else:
            script_text = None
            request = replace(request, directory=str((base / request.directory).absolute()))
        body = {"request": str(request), "script_text": script_text, "dry_run": dry_run}
        answer = self._ask("POST", PREFIX, body)
        return self._read(
            lambda: Submission(
                job=views.parse(answer["job"]), objects=tuple(Rendered(**each) for each in answer.get("objects", ()))
            )
        )

    def jobs(self) -> Sequence[JobView]:
        """All jobs that the adapter shows."""
        answer = self._ask("GET", PREFIX)
        return self._read(lambda: [views.parse(each) for each in answer["jobs"]])

    def job(self, name: str) -> JobView:
        """One job, with its events."""
        answer = self._ask("GET", f"{PREFIX}/{quote(name, safe='')}")
        return self._read(lambda: views.parse(answer))

    def act(self, name: str, verb: str) -> JobView:
        """Pass a verb on."""
        answer = self._ask("POST", f"{PREFIX}/{quote(name, safe='')}/{verb}", {})
        return self._read(lambda: views.parse(answer))

    def logs(self, name: str, which: LogQuery) -> Iterator[LogLine]:
        """Lines as they come."""
        asked = {"node": which.node, "rank": which.rank, "attempt": which.attempt}
        query = {key: value for key, value in asked.items() if value is not None} | {"follow": int(which.follow)}
        connection, response = self._open(
            "GET", f"{PREFIX}/{quote(name, safe='')}/logs?{urlencode(query)}", may_be_silent=True
        )
        return self._lines(connection, response)

    def _lines(self, connection: http.client.HTTPConnection, response: http.client.HTTPResponse) -> Iterator[LogLine]:
        try:
            while line := response.readline(MAX_LINE_BYTES + 1):
                yield LogLine(**json_text.loads(line, MAX_LINE_BYTES))
        except (OSError, http.client.HTTPException, ValueError, TypeError) as error:
            raise self._failure(str(error) or type(error).__name__) from error
        finally:
            response.close()
            connection.close()

    def _ask(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        connection, response = self._open(method, path, body)
        try:
            content = response.read(MAX_BYTES + 1)
            if len(content) > MAX_BYTES:
                raise self._failure(f"more than {MAX_BYTES} bytes")
            return _OBJECT.validate_json(content)
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise self._failure(str(error) or type(error).__name__) from error
        finally:
            response.close()
            connection.close()

    def _read(self, read: Callable[[], _Found]) -> _Found:
        """What is read from an answer."""
        try:
            return read()
        except (LookupError, TypeError, ValueError, RecursionError) as error:
            raise self._failure(f"{type(error).__name__}: {str(error).partition(chr(10))[0]}") from error

    def _open(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, *, may_be_silent: bool = False
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        """A response that is no error.

        Args:
            method: Of the request.
            path: Likewise.
            body: Likewise, as JSON.
            may_be_silent: What follows the head of the answer may come at any time.

        Raises:
            JobError: The adapter refuses (UnknownJobError: 404); the text is its own.
            LaunchError: It cannot be reached, or failed.
        """
        kind = http.client.HTTPSConnection if self._parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(str(self._parts.hostname), self._parts.port, timeout=TIMEOUT_S)
        headers = {"Content-Type": "application/json"}
        if self._token:
            headers["Authorization"] = f"Bearer {self._token}"
        try:
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            sock = connection.sock  # of an answer that ends with its connection, the response alone keeps it
            response = connection.getresponse()
            if response.status == http.client.OK:
                if may_be_silent and sock is not None:
                    sock.settimeout(None)
                return connection, response
            with response:
                said = response.read(2**20).decode(errors="replace")
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise self._failure(str(error) or type(error).__name__) from error
        connection.close()
        raise self._refusal(response.status, said)

    def _refusal(self, status: int, said: str) -> RingweaveError:
        try:
            text = str(json_text.loads(said)["error"])
        except (ValueError, KeyError, TypeError):
            return self._failure(f"HTTP {status}: {said.strip()[:200]}")  # no adapter's word, but a proxy's before it
        if status == http.client.NOT_FOUND:
            return UnknownJobError(text)
        if 400 <= status < 500:
            return JobError(text)
        return self._failure(f"HTTP {status}: {text}")

    def _failure(self, got: str) -> LaunchError:
        do = "See whether the adapter runs, and its own log"
        expected = "an answer of the protocol in docs/services.md"
        return LaunchError(explain(f"service {self._address}", got=got, expected=expected, do=do, where="--on"))


def open_service(address: str, environ: Mapping[str, str]) -> RemoteService:
    """The service at an address, with the token of the user's.

    Raises:
        UsageError: The address is none, or the token cannot be read.
    """
    path = environ.get(TOKEN_FILE)
    try:
        token = Path(path).read_text(encoding="utf-8").strip() if path else None
    except OSError as error:
        do = f"Correct {TOKEN_FILE}"
        raise UsageError(explain("token file", got=path, expected="a file that can be read", do=do)) from error
    return RemoteService(address, token)


_OBJECT = TypeAdapter(dict[str, Any])
