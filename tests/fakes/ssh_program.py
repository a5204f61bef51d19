"""A program `ssh` that runs the command on this machine: each host is a folder, and its home."""

import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from ringweave.platforms.hosts import ssh

_PROGRAM = """#!/bin/sh
for word in "$@"; do host=$command; command=$word; done
home={hosts}/$host
if [ ! -d "$home" ]; then
    echo "ssh: Could not resolve hostname $host: Name or service not known" >&2
    exit 255
fi
cd "$home"
export HOME=$home XDG_STATE_HOME=$home/.local/state XDG_CACHE_HOME=$home/.cache
export SSH_CONNECTION="127.0.0.1 1 127.0.0.1 22"
if [ -f "$home/.environment" ]; then . "$home/.environment"; fi
exec /bin/sh -c "$command"
"""


class SshHosts:
    """Hosts of the program, each a folder."""

    def __init__(self, folder: Path) -> None:
        self._hosts = folder / "hosts"
        program = folder / "bin" / "ssh"
        program.parent.mkdir(parents=True)
        program.write_text(_PROGRAM.format(hosts=self._hosts), encoding="utf-8")
        program.chmod(0o755)
        self.path = f"{program.parent}:{os.environ['PATH']}"

    def add(self, name: str, environ: Mapping[str, str] | None = None) -> Path:
        """Add a host with these variables; return its home."""
        home = self._hosts / name
        home.mkdir(parents=True)
        lines = [f"export {key}='{value}'\n" for key, value in (environ or {}).items()]
        (home / ".environment").write_text("".join(lines), encoding="utf-8")
        return home


def use_ssh_hosts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> SshHosts:
    """Put the program before the real ssh on the PATH of this process, and be patient with a busy machine."""
    monkeypatch.setattr(ssh, "CONNECT_TIMEOUT_S", 300.0)
    hosts = SshHosts(folder)
    monkeypatch.setenv("PATH", hosts.path)
    return hosts
