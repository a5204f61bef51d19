"""Processes of our own that attend to the workers of a run: coordinators of an elastic one, parameter servers."""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ringweave.errors import LaunchError
from ringweave.launch.local import bootstrap
from ringweave.launch.local.sites import Site
from ringweave.launch.workers import Meeting


@dataclass(frozen=True, kw_only=True, slots=True)
class Post:
    """Where one of them is."""

    node: str
    meeting: Meeting
    """Where others find it."""
    address: str | None = None
    """Where it listens itself; None: at the host where others find it, which may be a name that others resolve."""

    @property
    def listens_at(self) -> str:
        """The address that it listens at."""
        return self.address or self.meeting.host


def start(
    what: str, argv: Sequence[str], *, post: Post, site: Site, environ: Mapping[str, str], log: Path, secret: int
) -> "subprocess.Popen[bytes]":
    """Start one on its node, in a session of its own; the kernel ends it when this process is gone.

    Args:
        what: It, in words, for the error.
        argv: Its command.
        post: Where it is to be.
        site: Knows how its node is entered.
        environ: What it inherits; the node's own variables are put over it.
        log: What it prints is added to this file.
        secret: A descriptor of its credentials, which it inherits; closed here.

    Raises:
        LaunchError: It could not be started.
    """
    command = [sys.executable, "-I", "-S", bootstrap.__file__, str(os.getpid()), *site.enter_node(post.node, argv)]
    try:
        with log.open("ab") as output:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**environ, **site.environ(post.node)},
                start_new_session=True,
                pass_fds=(secret,),
            )
    except OSError as error:
        raise LaunchError(f"{what} could not be started: {error}. [node {post.node}]") from error
    finally:
        os.close(secret)
