"""A training that goes on until it is told to end, and its page as a browser reads it."""

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.ending import ended
from tests.launcher.small_training import epoch, prepared

_ROWS = "run['ranks']['rows']"
_MEASURES = f"len({_ROWS}) == run['head']['workers'] and all((row['step'] or {{}}).get('wall_s') for row in {_ROWS})"
MEASURED = f"run['progress']['total'] and {_MEASURES}"
"""Steps of all ranks have come that lie within the time shown."""
OVER = "run['head']['is_over']"


def training(flag: str) -> str:
    """Script that trains until that file is there."""
    also = "time.sleep(0.03)\nnumber += 1\niterations.done(number, 1.0 / number)"
    return f"""{prepared(num_samples=64)}
print("rank", os.environ["RANK"], "trains", flush=True)
number, is_over = 0, torch.zeros(1)
with ringweave.Iterations(total=1000000) as iterations:
    while not is_over:
{epoch(indent=8, also=also)}
        is_over = torch.tensor([float(os.path.exists({flag!r}))])
        torch.distributed.all_reduce(is_over)
"""


READER = """
import http.cookiejar, json, subprocess, sys, urllib.request

command = [sys.executable, "-P", "-m", "ringweave", "ui", *sys.argv[2:]]
page = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
try:
    address, run, wanted = page.stdout.readline().split()[-1], {}, json.loads(sys.argv[1])
    opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(http.cookiejar.CookieJar()))
    opener.open(address).read()
    with opener.open(address.partition("?")[0] + "live", timeout=300) as stream:
        for line in stream:
            run |= json.loads(line[6:]) if line.startswith(b"data: ") else {}
            while run and wanted and eval(wanted[0]):
                print(json.dumps(run), flush=True)
                del wanted[0]
            if not wanted:
                break
finally:
    page.terminate()
    page.wait()
"""
"""Program that prints the sections of a page when each of the conditions holds: JSON list of conditions, arguments."""


@contextmanager
def read_page(*conditions: str, words: tuple[str, ...], cwd: Path, environ: Mapping[str, str]) -> Iterator[Any]:
    """Yield the sections of `ringweave ui WORDS` when each of the conditions on `run` holds, one after the other."""
    command = [sys.executable, "-P", "-c", READER, json.dumps(conditions), *words]
    with ended(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=cwd, env=dict(environ))) as process:
        assert process.stdout is not None
        yield map(json.loads, process.stdout)
