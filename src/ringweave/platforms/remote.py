"""Remote platform over HTTP and JSON, `--on http://HOST:PORT` or `https://...` (docs/how-to/write-a-platform.md)."""

import http.client
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote, urlencode, urlsplit

from pydantic import TypeAdapter

from ringweave.errors import JobError, LaunchError, RingweaveError, UnknownJobError, UsageError
from ringweave.files import file_io
from ringweave.jobs.request import JobRequest
from ringweave.platforms import api, submission
from ringweave.platforms.api import JobView, LogLine, LogQuery, Platform, RenderedObject, Submission

JOBS_PATH = "/v2/jobs"
TOKEN_FILE = "RINGWEAVE_SERVICE_TOKEN_FILE"
"""Variable with the path of a file that holds the bearer token, by which the adapter identifies the user."""
ANSWER_TIMEOUT_S = 60.0
"""Timeout for the beginning of an answer; the lines of a followed log have no timeout."""
MAX_ANSWER_BYTES = 256 * 2**20
"""Upper limit of an answer."""
MAX_LINE_BYTES = 16 * 2**20
"""Upper limit of a log line with its JSON fields."""

_Parsed = TypeVar("_Parsed")


class RemotePlatform(Platform):
    """Remote platform: passes every request to an adapter."""

    def __init__(self, address: str, token: str | None = None) -> None:
        """`address` is `http://HOST:PORT` or `https://HOST:PORT`.

        Raises:
            UsageError: It is malformed.
        """
        parts = urlsplit(address)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.path.strip("/"):
            do = "Write it like https://jobs.example:8443"
            raise UsageError("service", got=address, expected="http(s)://HOST:PORT", do=do, where="--on")
        self._address, self._parts, self._token = address, parts, token

    def submit(
        self, request: JobRequest, *, base: Path, script_text: str | None = None, dry_run: bool = False
    ) -> Submission:
        """Pass the request on; a script that is alone travels with it, a directory has to exist at the adapter."""
        script_text = submission.read_request_script(request, base, script_text)
        if request.directory is not None:
            request = replace(request, directory=str((base / request.directory).absolute()))
        body = {"request": str(request), "script_text": script_text, "dry_run": dry_run}
        answer = self._request("POST", JOBS_PATH, body)
        return self._parse_answer(
            lambda: Submission(
                job=api.parse_job_view(answer["job"]),
                objects=tuple(RenderedObject(**each) for each in answer.get("objects", ())),
            )
        )

    def jobs(self) -> Sequence[JobView]:
        answer = self._request("GET", JOBS_PATH)
        return self._parse_answer(lambda: [api.parse_job_view(each) for each in answer["jobs"]])

    def job(self, name: str) -> JobView:
        answer = self._request("GET", f"{JOBS_PATH}/{quote(name, safe='')}")
        return self._parse_answer(lambda: api.parse_job_view(answer))

    def act(self, name: str, verb: str) -> JobView:
        answer = self._request("POST", f"{JOBS_PATH}/{quote(name, safe='')}/{verb}", {})
        return self._parse_answer(lambda: api.parse_job_view(answer))

    def logs(self, name: str, which: LogQuery) -> Iterator[LogLine]:
        filters = {"node": which.node, "rank": which.rank, "attempt": which.attempt}
        query = {key: value for key, value in filters.items() if value is not None}
        query |= {"follow": int(which.follow), "events": which.events}
        connection, response = self._open_response(
            "GET", f"{JOBS_PATH}/{quote(name, safe='')}/logs?{urlencode(query)}", may_be_silent=True
        )
        return self._lines(connection, response)

    def _lines(self, connection: http.client.HTTPConnection, response: http.client.HTTPResponse) -> Iterator[LogLine]:
        try:
            while line := response.readline(MAX_LINE_BYTES + 1):
                yield LogLine(**file_io.parse_json(line, MAX_LINE_BYTES))
        except (OSError, http.client.HTTPException, ValueError, TypeError) as error:
            raise self._failure(str(error) or type(error).__name__) from error
        finally:
            response.close()
            connection.close()

    def _request(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        connection, response = self._open_response(method, path, body)
        try:
            content = response.read(MAX_ANSWER_BYTES + 1)
            if len(content) > MAX_ANSWER_BYTES:
                raise self._failure(f"more than {MAX_ANSWER_BYTES} bytes")
            return _JSON_OBJECT.validate_json(file_io.bounded(content, MAX_ANSWER_BYTES))
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise self._failure(str(error) or type(error).__name__) from error
        finally:
            response.close()
            connection.close()

    def _parse_answer(self, read: Callable[[], _Parsed]) -> _Parsed:
        """Parse an answer; LaunchError if it is malformed."""
        try:
            return read()
        except (LookupError, TypeError, ValueError, RecursionError) as error:
            raise self._failure(f"{type(error).__name__}: {str(error).partition(chr(10))[0]}") from error

    def _open_response(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, *, may_be_silent: bool = False
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        """Send a request and return a response that is no error.

        `may_be_silent`: the body of the answer has no timeout.
        """
        kind = http.client.HTTPSConnection if self._parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(str(self._parts.hostname), self._parts.port, timeout=ANSWER_TIMEOUT_S)
        headers = {"Content-Type": "application/json"}
        if self._token:
            headers["Authorization"] = f"Bearer {self._token}"
        try:
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            sock = connection.sock  # if the answer ends with its connection, only the response keeps the socket
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
            text = str(file_io.parse_json(said)["error"])
        except (ValueError, KeyError, TypeError):
            return self._failure(f"HTTP {status}: {said.strip()[:200]}")  # from a proxy in front of the adapter
        if status == http.client.NOT_FOUND:
            return UnknownJobError(text)
        if 400 <= status < 500:
            return JobError(text)
        return self._failure(f"HTTP {status}: {text}")

    def _failure(self, got: str) -> LaunchError:
        do = "Check that the adapter runs, and read its log"
        expected = "an answer of the protocol in docs/how-to/write-a-platform.md"
        return LaunchError(f"service {self._address}", got=got, expected=expected, do=do, where="--on")


def open_remote_platform(address: str, environ: Mapping[str, str]) -> RemotePlatform:
    """Open the platform at an address, with the user's token.

    Raises:
        UsageError: The address is malformed, or the token cannot be read.
    """
    path = environ.get(TOKEN_FILE)
    try:
        token = Path(path).read_text(encoding="utf-8").strip() if path else None
    except OSError as error:
        do = f"Correct {TOKEN_FILE}"
        raise UsageError("token file", got=path, expected="a file that can be read", do=do) from error
    return RemotePlatform(address, token)


_JSON_OBJECT = TypeAdapter(dict[str, Any])
