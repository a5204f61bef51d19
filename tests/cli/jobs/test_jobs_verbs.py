"""The verbs on jobs by `main.run_command_line`, on jobs of which nothing runs: their supervisors are never started."""

import json
from pathlib import Path

import pytest
import yaml
from click.shell_completion import ShellComplete

from ringweave.cli import jobs, main, submit
from ringweave.cli.echo import align_columns
from ringweave.platforms import submission
from ringweave.platforms.local import supervisor

JOB = """
name: text
cpu_workers: 11
script: train.py
nodes:
  - {name: big, capacity: 10}
  - {name: small, capacity: 5, max_retries: 1}
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setattr(supervisor, "ensure_supervisor", lambda state, job_id, environ: None)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.yaml").write_text(JOB)
    (tmp_path / "train.py").write_text("pass")
    return tmp_path


@pytest.fixture
def ask(capsys: pytest.CaptureFixture[str]):
    """`ask("jobs")`: exit code, standard output, standard error."""

    def call(*argv: str) -> tuple[int, str, str]:
        code = main.run_command_line(list(argv))
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def test_the_plan_is_shown_and_nothing_is_submitted(ask) -> None:
    code, out, err = ask("submit", "job.yaml", "--dry-run")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0].startswith("job text on local for ")
    assert lines[1].startswith("split    11 on 2 of 2 nodes: the fewest that hold them, the largest first, at least 3")
    assert lines[2:4] == ["  big: 8 of 10, ranks 0-7", "  small: 3 of 5, ranks 8-10"]
    assert lines[4] == "rings    in each node one of its own workers; through all: 0 1 2 3 4 5 6 7 8 9 10"
    assert lines[5].startswith("leaders  rank ")
    assert "predicted" in lines[6]
    assert lines[7] == "nothing was submitted"
    assert ask("jobs")[1] == "no jobs\n"


def test_the_plan_follows_the_options_of_the_workers(ask) -> None:
    words = ("--command", "sh", "--arguments", "-c true", "--order", "round-robin", "--schedule", "ring")
    code, out, err = ask("submit", "job.yaml", *words, "--dry-run")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0].endswith(": 11 CPU workers, sh")
    assert lines[2:4] == ["  big: 8 of 10, ranks 0 2 4 6 7 8 9 10", "  small: 3 of 5, ranks 1 3 5"]
    assert lines[6].startswith("first    ring for 25MB, as the job asks, predicted ")
    code, out, _ = ask("submit", "job.yaml", "--module", "json.tool", "--schedule", "native", "--dry-run", "--json")
    plan = json.loads(out)["plan"]
    assert (code, plan["schedule"], plan["predicted_s"]) == (0, "native", None)
    assert [node["ranks"] for node in plan["split"]] == [list(range(8)), [8, 9, 10]]
    code, _, err = ask("submit", "job.yaml", "--schedule", "rings", "--dry-run")
    assert (code, "schedule: 'rings', expected one of ring, " in err) == (2, True)
    assert err.rstrip().endswith("[--schedule]")


def test_the_plan_of_an_elastic_job_on_one_node_names_its_coordinator(ask) -> None:
    words = ("--cpu-workers", "4", "--elastic", "2", "--dry-run")
    _, out, _ = ask("submit", "job.yaml", *words)
    wanted = "elastic  continues with 2 of 4 workers or more when others fail; coordinator on big"
    assert wanted in out.splitlines()


def test_the_plan_of_an_elastic_job_says_with_how_many_it_goes_on(ask) -> None:
    code, out, err = ask("submit", "job.yaml", "--elastic", "3", "--dry-run")
    assert (code, err) == (0, "")
    wanted = "elastic  continues with 3 of 11 workers or more when a node is lost; coordinators on big and small"
    assert wanted in out.splitlines()
    code, out, err = ask("submit", "job.yaml", "--elastic", "3", "--spares", "2", "--dry-run")
    assert (code, err) == (0, "")
    assert f"{wanted}; 2 spares on each node" in out.splitlines()
    code, out, err = ask("submit", "job.yaml", "--spares", "2", "--dry-run")
    assert (code, out) == (2, "")
    assert "--spares: 'no --elastic', expected an elastic job. Add --elastic MIN" in err
    code, out, err = ask("submit", "job.yaml", "--elastic", "9", "--dry-run")
    assert (code, out) == (2, "")
    assert "elastic.min: 9, expected 1 to 8, which are left without the smallest node (small, 3 workers)." in err
    assert err.rstrip().endswith("[--elastic]")


def test_the_plan_says_where_the_parameter_servers_of_an_elastic_job_are(ask) -> None:
    words = ("submit", "job.yaml", "--mode", "ps-hra", "--elastic", "3", "--dry-run")
    assert "server   on big, the first node" in ask(*words)[1].splitlines()
    code, out, _ = ask(*words, "--standby")
    assert (code, "server   on big, the first node; its standby on small" in out.splitlines()) == (0, True)
    plan = json.loads(ask(*words, "--standby", "--json")[1])["plan"]
    assert (plan["server"], plan["standby"]) == ("big", "small")
    code, _, err = ask("submit", "job.yaml", "--mode", "ps-hra", "--standby", "--dry-run")
    assert code == 2
    assert (
        "standby: 'mode ps-hra without elastic', expected an elastic job with mode ps-hra, ps or local. Leave standby"
        in err
    )


def test_dry_run_full_has_what_the_job_becomes(ask) -> None:
    code, out, _ = ask("submit", "job.yaml", "--dry-run=full", "--json")
    document = json.loads(out)
    assert code == 0
    assert [node["workers"] for node in document["plan"]["split"]] == [8, 3]
    config = json.loads(document["objects"]["config.json"])
    assert config["script_text"] == "pass"
    assert "devices: 8" in document["objects"]["cluster.yaml"]


def test_nobody_there_to_be_asked(ask) -> None:
    code, _, err = ask("submit", "job.yaml")
    assert code == 2
    assert "answer: 'no terminal', expected a terminal for the confirmation. Add -y to submit" in err


def test_who_says_no_has_submitted_nothing(ask, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submit.click, "confirm", lambda text, err: False)
    monkeypatch.setattr(submit.sys.stdin, "isatty", lambda: True, raising=False)
    code, _, err = ask("submit", "job.yaml")
    assert (code, err.splitlines()[-1]) == (1, "ringweave: nothing was submitted")
    assert ask("jobs")[1] == "no jobs\n"


def test_the_policy_of_the_machine_comes_before_the_users(ask, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submission, "MACHINE_CONFIG_DIR", here)
    (here / "policy.yaml").write_text('rules: [{users: ["*"], verbs: [jobs]}]')
    (here / "config" / "ringweave").mkdir(parents=True)
    (here / "config" / "ringweave" / "policy.yaml").write_text('rules: [{users: ["*"]}]')
    assert "expected a permission" in ask("submit", "job.yaml", "--dry-run")[2]


def test_wide_is_answered_by_all(ask) -> None:
    ask("submit", "job.yaml", "-y", "--detach")
    for verb in ("why", "events", "logs", "stop"):
        code, out, err = ask(verb, "text", "-o", "wide")
        assert (code, err) == (0, "")
        assert (code, out, err) == ask(verb, "text")


def test_watched_each_document_stands_alone(ask, monkeypatch: pytest.MonkeyPatch) -> None:
    ask("submit", "job.yaml", "-y", "--detach")
    monkeypatch.setattr(jobs, "watch_job", lambda service, name: iter([service.job(name)] * 2))
    assert [json.loads(line)["name"] for line in ask("status", "text", "-w", "-o", "json")[1].splitlines()] == [
        "text"
    ] * 2
    documents = list(yaml.safe_load_all(ask("status", "text", "-w", "-o", "yaml")[1]))
    assert [each["name"] for each in documents] == ["text"] * 2


def test_what_was_submitted_is_told_in_every_form(ask) -> None:
    assert ask("submit", "job.yaml", "-y", "--detach")[0] == 0
    code, out, _ = ask("jobs", "-o", "wide")
    assert code == 0
    assert out.splitlines()[0].split() == ["name", "state", "workers", "nodes", "requester", "age", "mode", "reason"]
    assert out.splitlines()[1].startswith("text  Pending")
    assert json.loads(ask("jobs", "--json")[1])["jobs"][0]["name"] == "text"
    assert "name: text" in ask("jobs", "-o", "yaml")[1]

    code, out, _ = ask("status", "text")
    assert code == 0
    assert out.splitlines()[0].startswith("text: Pending for ")
    assert "reason waits for nodes big, small to be ready; no node starts before all are ready" in out
    rows = [line.split() for line in out.splitlines() if line.startswith(("big", "small"))]
    assert rows == [
        ["big", "8", "of", "10", "Waiting", "1", "0", "of", "3", "-", "-"],
        ["small", "3", "of", "5", "Waiting", "1", "0", "of", "1", "-", "-"],
    ]
    (row,) = [line for line in ask("status", "text", "-o", "wide")[1].splitlines() if line.startswith("big")]
    assert row.endswith("-          waits for its worker group to be created (attempt 1)")
    code, out, _ = ask("why", "text")
    assert out.splitlines()[0] == (
        "text is Pending: waits for nodes big, small to be ready; no node starts before all are ready."
    )
    assert json.loads(ask("why", "text", "--json")[1])["reason"]["code"] == "NotReady"
    assert json.loads(ask("events", "text", "--json")[1]) == {"name": "text", "events": []}
    assert ask("events", "text")[1] == "no events\n"
    assert json.loads(ask("logs", "text", "--json")[1]) == {"name": "text", "lines": []}
    assert 'ringweave_job_state{job="text"' in ask("jobs", "--metrics")[1]


def test_flags_go_over_the_file_and_make_a_job_alone(ask) -> None:
    document = json.loads(ask("submit", "job.yaml", "--cpu-workers", "15", "--name", "other", "--dry-run", "--json")[1])
    assert (document["job"]["name"], document["job"]["workers"]) == ("other", 15)
    alone = ("--name", "x", "--cpu-workers", "7", "--script", "train.py", "--capacity", "4,4")
    document = json.loads(ask("submit", *alone, "--dry-run", "--json")[1])
    assert [node["workers"] for node in document["job"]["nodes"]] == [4, 3]


def test_flags_say_all_that_a_file_can(ask, here: Path) -> None:
    (here / "job.yaml").write_text(f"{JOB}environment: {{A: one, B: two}}\n")
    of_nodes = ("--capacity", "2,2", "--min-per-node", "2", "--max-retries", "0", "--deletion", "keep")
    of_workers = ("--cpu-workers", "4", "--env", "B=2", "--env", "C=x=y", "--arguments", "--name 'a b'", "--data", "/d")
    out = ask("submit", "job.yaml", *of_nodes, *of_workers, "--image", "i:1", "--dry-run=full", "--json")[1]
    document = json.loads(out)
    assert [(node["workers"], node["max_retries"]) for node in document["job"]["nodes"]] == [(2, 0), (2, 0)]
    config = json.loads(document["objects"]["config.json"])
    assert config["environment"] == {"A": "one", "B": "2", "C": "x=y"}
    assert (config["arguments"], config["data"]) == (["--name", "a b"], "/d")


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["submit", "nosuch.yaml"], "nosuch.yaml"),
        (["submit", "job.yaml", "--gpus", "16", "--dry-run"], "split: 16, expected a total that nodes of (10, 5)"),
        (
            ["submit", "job.yaml", "--capacity", "a"],
            "--capacity: 'a', expected whole numbers separated by commas, one for each node",
        ),
        (["submit", "job.yaml", "--ttl", "3", "--dry-run"], "[--ttl]"),
        (
            ["submit", "job.yaml", "--max-retries", "1", "--deletion", "keep"],
            "flags: '--max-retries, --deletion', expected --capacity, to whose nodes they apply. Write them into",
        ),
        (
            ["submit", "job.yaml", "--capacity", "10,5", "--deletion", "never", "--dry-run"],
            "deletion policy: 'never', expected one of delete, keep, keep-on-failure. Leave it out for delete. "
            "[--capacity, --max-retries, --deletion]",
        ),
        (["submit", "job.yaml", "--env", "SEED"], "--env: 'SEED', expected NAME=VALUE. Write it like SEED=1."),
        (["submit", "job.yaml", "--arguments", "'a"], '--arguments: "\'a", expected words in shell syntax.'),
        (
            ["status", "nosuch"],
            "job: 'nosuch', expected the name of an existing job. See ringweave jobs, or name its platform with "
            "--on. [local]",
        ),
        (["jobs", "--on", "nosuch"], "service: 'nosuch', expected one of"),
        (["logs", "-f", "--json", "x"], "-o: 'json', expected table with --follow, which never ends. Leave out one"),
    ],
)
def test_what_is_refused(argv: list[str], text: str, ask) -> None:
    code, out, err = ask(*argv)
    assert code == 2
    assert text in err
    assert out == "" or json.loads(out)["error"]


@pytest.mark.parametrize("words", [["-o", "json"], ["-ojson"], ["--output", "json"], ["--output=json"], ["--json"]])
def test_an_error_is_a_document_too(ask, words: list[str]) -> None:
    code, out, _ = ask("status", "nosuch", *words)
    assert code == 2
    assert json.loads(out)["error"].startswith("job: 'nosuch'")


@pytest.mark.parametrize(("verb", "said"), [("stop", "it will stop"), ("suspend", "it will be suspended")])
def test_verbs(verb: str, said: str, ask) -> None:
    ask("submit", "job.yaml", "-y", "--detach")
    assert ask(verb, "text")[:2] == (0, f"text: {said}\n")
    assert ask("resume", "text")[1] == "text: it may run\n"
    assert ask("delete", "text", "--no-wait")[1] == "text: it will be removed\n"
    code, _, err = ask("retry", "text")
    assert code == 2
    assert "retry of job text: 'Deleting', expected a job that is not being deleted. Submit it again" in err


def test_a_policy_of_the_user_holds(ask, here: Path) -> None:
    (here / "config" / "ringweave").mkdir(parents=True)
    (here / "config" / "ringweave" / "policy.yaml").write_text('rules: [{users: ["*"], verbs: [jobs]}]')
    code, _, err = ask("submit", "job.yaml", "--dry-run")
    assert code == 2
    assert "expected a permission" in err


def complete(*words: str) -> list[str]:
    *before, incomplete = words
    shell = ShellComplete(main.ringweave_group, {}, "ringweave", "_RINGWEAVE_COMPLETE")
    return [item.value for item in shell.get_completions(before, incomplete)]


def test_the_shell_completes_verbs_and_names_of_jobs(ask) -> None:
    ask("submit", "job.yaml", "-y", "--detach")
    assert complete("st") == ["status", "stop"]
    assert complete("status", "te") == ["text"]
    assert complete("status", "--wa") == ["--watch"]
    assert complete("status", "--on", "nosuch", "te") == []


def test_tables() -> None:
    assert align_columns([("a", "b"), ("long", "c")]) == ["a     b", "long  c"]
    assert jobs.format_utc(0.0) == "1970-01-01 00:00:00Z"
