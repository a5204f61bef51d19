"""`ringweave run --elastic` itself, with real kills."""

import os
import re
import signal
import textwrap
from pathlib import Path

import pytest

from tests.launcher import kept_secrets
from tests.launcher.conftest import ringweave
from tests.polling import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.e2e, pytest.mark.timeout(900)]

UNTIL_IT_IS_BACK = """
    import torch, ringweave
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    torch.manual_seed(0)
    inputs = torch.randn(96, 8)
    model = nn.Linear(8, 1)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    data = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=12, shuffle=True)
    model, optimizer, loader = ringweave.prepare(model, optimizer, data)
    print("joined as " + os.environ["RINGWEAVE_MEMBER"] + chr(10), end="", flush=True)
    left = 5
    for epoch in loader.epochs(100000):
        for given, wanted in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(given), wanted).backward()
            optimizer.step()
            time.sleep(0.02)
            left -= any(each.startswith("1.") and each != "1.0" for each in loader.members)
            if left == 0:
                break
        if left == 0:
            break
    print("sum", sum(float(each.detach().double().sum()) for each in model.parameters()), flush=True)
"""

PLAIN = """
    import pathlib
    tries = pathlib.Path(f"tries-{rank}")
    tries.write_text(tries.read_text() + "x" if tries.exists() else "x")
    if rank == 1 and tries.read_text() == "x":
        first = pathlib.Path("tries-0")
        while not (first.exists() and first.read_text()):
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGKILL)
    if tries.read_text() == "x":
        time.sleep(300)
    print("done", flush=True)
"""


def test_a_killed_worker_comes_back_and_the_others_go_on(start, script) -> None:
    given = script(kept_secrets.TELLS + textwrap.dedent(UNTIL_IT_IS_BACK))
    run = start("--elastic", "1:2", "--workers", "2", "--mode", "sync", given)
    run.wait_printed("joined as 0.0")
    run.wait_printed("joined as 1.0")
    os.kill(run.pids()[1], signal.SIGKILL)
    assert run.wait_ended() == 0, run.stderr + run.stdout
    assert re.search(r"joined as 1\.[1-9]", run.stdout)
    sums = {line.split()[-1] for line in run.stdout.splitlines() if "sum" in line}
    assert len(sums) == 1, "both end with the same parameters"
    assert (run.record["outcome"], run.record["elastic"]) == ("done", "1:2")
    epochs = [event["members"] for event in run.events("generation_begun")]
    # Whoever stands still for long on a busy machine is put out, and replaced as well.
    assert (epochs[0], [each.partition(".")[0] for each in epochs[-1]]) == (["0.0", "1.0"], ["0", "1"])
    assert epochs[-1][1] != "1.0"
    assert any(len(each) == 1 for each in epochs), "one went on alone"
    exits = [event["signal"] for event in run.events("worker_exited")]
    assert (exits[0], exits[-1]) == ("SIGKILL", None)
    names = {"run.json", "events.jsonl", "coordinator-0.log", "rank-1.log"}
    kept_secrets.check_none(run.run_dir, run.folder / "secrets", num_told=3, names=names)


def test_a_script_without_prepare_starts_again_as_a_whole_and_it_is_said(start, script) -> None:
    run = start("--elastic", "1:2", "--workers", "2", script(PLAIN))
    assert run.wait_ended() == 0, run.stderr
    assert "no worker had called ringweave.prepare, so all workers restart" in run.stderr
    wait_until(lambda: run.stdout.count("done") == 2, "both done")
    assert run.record["attempt"] == 2


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--elastic", "3:2"], "--elastic: '3:2', expected MIN:MAX"),
        (["--elastic", "3:4", "--workers", "2"], "--elastic: '3:4', expected MIN <= 2 workers <= MAX"),
        (
            ["--elastic", "1:4", "--mode", "auto", "--standby"],
            "--standby with --mode: 'auto', expected ps-hra, ps or local",
        ),
    ],
)
def test_what_cannot_be_is_refused(script, tmp_path: Path, arguments: list[str], text: str) -> None:
    run = ringweave("run", "--run-dir", tmp_path / "run", *arguments, script("pass"))
    assert run.returncode == 2
    assert text in run.stderr
