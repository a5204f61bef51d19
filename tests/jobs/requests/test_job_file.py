import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringweave.errors import JobError
from ringweave.jobs import request as jobs_request
from ringweave.jobs.request import (
    MODES,
    PROGRAM_KEYS,
    DeletionPolicy,
    ElasticRequest,
    JobFlag,
    JobRequest,
    NodeRequest,
)
from ringweave.jobs.worker_options import RankOrder, WorkerOptions
from ringweave.schedules import SCHEDULE_NAMES

FULL = """\
name: text
gpus: 15
script: train.py
directory: src
arguments: [--epochs, "3"]
environment: {SEED: "1"}
data: /data/text
image: registry.example/train:1
mode: balanced
nodes:
  - {name: big, capacity: 10, max_retries: 5, deletion: keep-on-failure}
  - {name: small, capacity: 5, count: 2}
  - {capacity: 4}
min_per_node: 2
ttl: 3600s
suspend: true
claim: team.checkpoints
"""
SHORT = "name: text\ncpu_workers: 4\nscript: train.py\nnodes: [{capacity: 4}]\n"


def test_a_full_file() -> None:
    assert jobs_request.parse_request(FULL) == JobRequest(
        name="text",
        num_workers=15,
        script="train.py",
        directory="src",
        arguments=("--epochs", "3"),
        environment={"SEED": "1"},
        data="/data/text",
        image="registry.example/train:1",
        claim="team.checkpoints",
        mode="balanced",
        nodes=(
            NodeRequest(name="big", capacity=10, max_retries=5, deletion=DeletionPolicy.KEEP_ON_FAILURE),
            NodeRequest(name="small-0", capacity=5),
            NodeRequest(name="small-1", capacity=5),
            NodeRequest(name="n3", capacity=4),
        ),
        min_per_node=2,
        ttl_s=3600.0,
        suspend=True,
    )


def test_a_short_file_asks_for_processes_without_gpus() -> None:
    request = jobs_request.parse_request(SHORT)
    assert (request.device, request.num_workers, request.nodes[0].name) == ("cpu", 4, "n0")
    assert request.split.counts == (4,)
    assert str(request) == "name: text\ncpu_workers: 4\nscript: train.py\nnodes:\n  - {name: n0, capacity: 4}\n"


OPTIONS = "schedule: ring\ntuning: false\norder: shuffled:7\nreplace_backend: true\nleader_per_nic: true\n"


def test_options_of_the_workers() -> None:
    request = jobs_request.parse_request(SHORT + OPTIONS)
    assert request.worker_options == WorkerOptions(
        schedule="ring",
        tuning=False,
        order=RankOrder(kind="shuffled", seed=7),
        replace_backend=True,
        leader_per_nic=True,
    )
    assert jobs_request.parse_request(str(request)) == request
    assert jobs_request.parse_request(SHORT).worker_options == WorkerOptions()
    flags = {"tuning": JobFlag(name="--tuning", value=True), "order": JobFlag(name="--order", value="block")}
    assert jobs_request.parse_request(SHORT + OPTIONS, flags).worker_options.tuning is True
    assert jobs_request.parse_request(SHORT + OPTIONS, flags).order == "block"


@pytest.mark.parametrize(
    ("option", "told"),
    [
        ("schedule: rings", r"schedule: 'rings', expected one of ring, .*Did you mean \"ring\"\? \[j:5: schedule\]"),
        ("schedule: x", r"schedule: 'x', expected one of .*Leave it out for the planner's choice\."),
        ("order: blok", r"order: 'blok', expected block, round-robin, shuffled or shuffled:SEED with a whole number\."),
        ('tuning: "no"', r"tuning: 'no', expected true or false\. Write it like \"tuning: false\"\. \[j:5: tuning\]"),
        ("replace_backend: 1", r"replace_backend: 1, expected true or false"),
        (
            "max_loss_increase: 0.5",
            r"max_loss_increase: 0.5, expected a percentage above 0 and up to 100, such as 0.5%",
        ),
        (
            "max_loss_increase: 0%",
            r"largest loss increase: '0%', expected a percentage above 0 and up to 100, such as 0.5%. Leave it out",
        ),
        ("leader_per_nic:", r"leader_per_nic: None, expected true or false"),
    ],
)
def test_wrong_options(option: str, told: str) -> None:
    with pytest.raises(JobError, match=told):
        jobs_request.parse_request(f"{SHORT}{option}\n", source="j")


def test_a_command_has_no_spares() -> None:
    flag = {"command": JobFlag(name="--command", value="bash")}
    text = (
        r"elastic\.spares: 1, expected none with a command: a spare runs a Python script or module\. Leave spares out"
    )
    with pytest.raises(JobError, match=text):
        jobs_request.parse_request(f"{TWO_NODES}elastic: {{min: 4, spares: 1}}\n", flag)


def test_a_module_or_a_command_in_the_place_of_a_script() -> None:
    for program in ("module: text.train\n", "command: bash\narguments:\n  - train.sh\n"):
        text = SHORT.replace("script: train.py\n", program)
        request = jobs_request.parse_request(text)
        assert request.script is None
        assert program in str(request)
        assert jobs_request.parse_request(str(request)) == request
    flag = {"command": JobFlag(name="--command", value="bash")}
    assert (jobs_request.parse_request(SHORT, flag).script, jobs_request.parse_request(SHORT, flag).command) == (
        None,
        "bash",
    )


def test_a_job_has_one_program() -> None:
    with pytest.raises(
        JobError,
        match=r"program of the job: 'script and module', expected one of script, module and command\. "
        r"Leave module out\. \[j:5: module\]",
    ):
        jobs_request.parse_request(f"{SHORT}module: m\n", source="j")
    with pytest.raises(
        JobError,
        match=r"program of the job: 'none of them', expected one of .*\. Write \"script: train\.py\"\. \[j:1\]",
    ):
        jobs_request.parse_request(SHORT.replace("script: train.py\n", ""), source="j")
    with pytest.raises(JobError, match=r"module: ' ', expected the name of a module, such as text\.train\."):
        jobs_request.parse_request(SHORT.replace("script: train.py", 'module: " "'))


def test_a_file_on_disk(tmp_path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(SHORT)
    assert jobs_request.load_request(path) == jobs_request.parse_request(SHORT)
    with pytest.raises(JobError, match=r"job file: 'No such file.*expected a YAML file.*Did you mean \".*job\.yaml\""):
        jobs_request.load_request(tmp_path / "jobs.yaml")


def test_a_lab_has_no_gpus() -> None:
    assert jobs_request.parse_request(f"{SHORT}lab: two-racks\n").lab == "two-racks"
    with pytest.raises(
        JobError, match=r"lab: 'two-racks', expected none for GPUs: a lab limits links and CPU time\. Ask"
    ):
        jobs_request.parse_request(f"{FULL}lab: two-racks\n")


def test_a_claim_has_the_name_of_one() -> None:
    with pytest.raises(JobError, match=r"claim: 'My_Claim', expected the name of a PersistentVolumeClaim: l"):
        jobs_request.parse_request(f"{SHORT}claim: My_Claim\n")


TWO_NODES = "name: text\ncpu_workers: 9\nscript: s.py\nnodes: [{name: a, capacity: 5}, {name: b, capacity: 4}]\n"


def test_an_elastic_job_says_with_how_many_it_goes_on() -> None:
    request = jobs_request.parse_request(f"{TWO_NODES}elastic: {{min: 4}}\n")
    assert request.elastic == ElasticRequest(min=4)
    assert "elastic: {min: 4}\n" in str(request)
    with_spares = jobs_request.parse_request(f"{TWO_NODES}elastic: {{min: 4, spares: 2}}\n")
    assert with_spares.elastic == ElasticRequest(min=4, spares=2)
    assert jobs_request.parse_request(str(with_spares)) == with_spares
    assert jobs_request.parse_request(str(request)) == request
    assert jobs_request.parse_request(TWO_NODES, {"elastic": JobFlag(name="--elastic", value={"min": 4})}) == request


def test_a_job_of_mode_local_may_be_elastic_and_have_a_standby() -> None:
    assert jobs_request.parse_request(f"{TWO_NODES}mode: local\n").mode == "local"
    assert jobs_request.parse_request(f"{TWO_NODES}mode: local\nelastic: {{min: 4}}\nstandby: true\n").standby


def test_an_elastic_job_may_have_a_standby_server() -> None:
    request = jobs_request.parse_request(f"{TWO_NODES}mode: ps\nelastic: {{min: 4}}\nstandby: true\n")
    assert request.standby
    assert jobs_request.parse_request(str(request)) == request
    for rest, got in (("mode: ps\n", "'mode ps without elastic'"), ("elastic: {min: 4}\n", "'mode auto'")):
        with pytest.raises(JobError, match=rf"standby: {got}, expected an elastic job with mode ps-hra, ps or local\."):
            jobs_request.parse_request(f"{TWO_NODES}{rest}standby: true\n")
    one_node = "name: a\ncpu_workers: 3\nscript: a.py\nnodes: [{capacity: 3}]\nmode: ps\nelastic: {min: 2}\n"
    with pytest.raises(JobError, match=r"standby: 'one node', expected two nodes or more: one can be lost\."):
        jobs_request.parse_request(f"{one_node}standby: true\n")


@pytest.mark.parametrize(
    ("elastic", "told"),
    [
        (
            "{min: 6}",
            r"elastic\.min: 6, expected 1 to 5, which are left without the smallest node \(b, 4 workers\)\. "
            r"Write min: 5, or less to survive the loss of larger nodes\. \[j:5: elastic\.min\]",
        ),
        ("{min: 0}", r"elastic\.min: 0, expected 1 to 5"),
        ("{least: 3}", r"unknown key in elastic: 'least', expected one of min, spares\."),
        ("{min: 3, spares: 65}", r"elastic\.spares: 65, expected a whole number from 0 to 64"),
        ("3", r"elastic: 3, expected a map with min: the smallest number of workers with which"),
        ('{min: "3"}', r"min: '3', expected a whole number from 1 .*\[j:5: elastic\.min\]"),
    ],
)
def test_wrong_elastic_jobs(elastic: str, told: str) -> None:
    with pytest.raises(JobError, match=told):
        jobs_request.parse_request(f"{TWO_NODES}elastic: {elastic}\n", source="j")


def test_an_elastic_job_on_one_node_goes_on_with_some_of_its_workers() -> None:
    for least in (1, 4):
        request = jobs_request.parse_request(f"{SHORT}elastic: {{min: {least}}}\n")
        assert request.elastic == ElasticRequest(min=least)
    with pytest.raises(
        JobError,
        match=r"elastic\.min: 5, expected 1 to 4, the workers of its one node\. Write min: 4, or less to continue "
        r"while some of them are away\. \[j:5: elastic\.min\]",
    ):
        jobs_request.parse_request(f"{SHORT}elastic: {{min: 5}}\n", source="j")


def test_a_flag_says_where_a_wrong_minimum_comes_from() -> None:
    with pytest.raises(JobError, match=r"elastic\.min: 9, .*\[--elastic\]"):
        jobs_request.parse_request(TWO_NODES, {"elastic": JobFlag(name="--elastic", value={"min": 9})})


names = st.from_regex(r"[a-z](?:[a-z0-9-]{0,38}[a-z0-9])?", fullmatch=True)
lines = st.text(st.characters(categories=["L", "N", "P", "S"]), min_size=1, max_size=20)
texts = st.text(max_size=20).filter(lambda text: "\0" not in text and text.isprintable())
nodes = st.builds(
    NodeRequest,
    name=names,
    capacity=st.integers(0, 2**31 - 1),
    max_retries=st.integers(0, 1000),
    deletion=st.sampled_from(DeletionPolicy),
)
requests = st.builds(
    lambda program, **rest: JobRequest(**dict([program]), **rest),
    program=st.tuples(st.sampled_from(PROGRAM_KEYS), lines),
    name=names,
    num_workers=st.integers(1, 2**31 - 1),
    nodes=st.lists(nodes, min_size=1, max_size=4, unique_by=lambda node: node.name).map(tuple),
    device=st.sampled_from(["cpu", "cuda"]),
    directory=st.none() | lines,
    arguments=st.lists(texts, max_size=3).map(tuple),
    environment=st.dictionaries(st.from_regex(r"[A-Q_]\w{0,9}", fullmatch=True).filter(str.isascii), texts, max_size=3),
    data=st.none() | lines,
    image=st.none() | lines,
    claim=st.none() | names,
    mode=st.sampled_from(MODES),
    schedule=st.none() | st.sampled_from(SCHEDULE_NAMES),
    tuning=st.none() | st.booleans(),
    order=st.sampled_from(["block", "round-robin", "shuffled:3"]),
    replace_backend=st.booleans(),
    leader_per_nic=st.booleans(),
    max_loss_increase=st.sampled_from([None, "0.5%", "12%"]),
    min_per_node=st.integers(1, 2**31 - 1),
    ttl_s=st.none() | st.floats(0, 3e8),
    suspend=st.booleans(),
)


@pytest.mark.slow
@given(requests)
def test_a_printed_request_reads_back_equal(request_: JobRequest) -> None:
    assert jobs_request.parse_request(str(request_)) == request_


def test_flags_replace_what_the_file_says() -> None:
    flags = {
        "gpus": JobFlag(name="--gpus", value=11),
        "nodes": JobFlag(name="--capacity", value=[{"capacity": 10}, {"capacity": 5}]),
        "arguments": JobFlag(name="ARGUMENTS", value=["--fast"]),
    }
    request = jobs_request.parse_request(SHORT, flags)
    assert (request.device, request.num_workers, request.arguments) == ("cuda", 11, ("--fast",))
    assert request.split.counts == (8, 3)


def test_flags_alone_make_a_request() -> None:
    values = {"name": "text", "cpu_workers": 4, "script": "train.py", "nodes": [{"capacity": 4}]}
    flags = {key: JobFlag(name=f"--{key}", value=value) for key, value in values.items()}
    assert jobs_request.request_from_flags(flags) == jobs_request.parse_request(SHORT)
    del flags["name"]
    with pytest.raises(JobError, match=r"missing key at the top of the file.*\[command line\]"):
        jobs_request.request_from_flags(flags)


def test_a_wrong_flag_is_named_as_it_was_typed() -> None:
    with pytest.raises(JobError, match=r"mode: 'synch', expected one of .* Did you mean \"sync\"\? \[--mode\]"):
        jobs_request.parse_request(SHORT, {"mode": JobFlag(name="--mode", value="synch")})


def put(old: str, new: str) -> str:
    assert old in FULL
    return FULL.replace(old, new)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", r"job file: 'nothing', expected a map with the keys name, gpus .*Begin with \"name: my-job\"\. \[j:1\]"),
        ("- a", r"job file: \['a'\], expected a map with the keys name, gpus"),
        (
            put("script:", "scirpt:"),
            r"unknown key at the top of the file: 'scirpt', expected one of name, .*"
            r"Did you mean \"script\"\? \[j:3: scirpt\]",
        ),
        (
            put("capacity: 10", "capactiy: 10"),
            r"unknown key in nodes\.0: 'capactiy', expected one of name, capacity, .*"
            r"Did you mean \"capacity\"\? \[j:11: nodes\.0\.capactiy\]",
        ),
        (
            put("gpus: 15\n", ""),
            r"total of the job: 'neither', expected either gpus or cpu_workers\. Write \"gpus:",
        ),
        (put("gpus: 15", "gpus: 15\ncpu_workers: 3"), r"total of the job: 'both', .*\[j:3: cpu_workers\]"),
        (put("gpus: 15", "gpus: 0"), r"GPUs in all: 0, expected a whole number from 1 to .*\[j:2: gpus\]"),
        (
            put("gpus: 15", 'gpus: "15"'),
            r"gpus: '15', expected a whole number .*Write it like .*\[j:2: gpus\]",
        ),
        (put("name: text", "name: Text"), r"name of the job: 'Text', expected lower-case letters.*\[j:1: name\]"),
        (put("balanced", "sinc"), r"mode: 'sinc', expected one of auto, sync, .*Did you mean \"sync\"\? \[j:9: mode\]"),
        (put('"3"]', "3]"), r"arguments\.1: 3, expected a list of texts; numbers in quotes\. Write it like .*\[j:5: "),
        (put('"1"}', "1}"), r"environment\.SEED: 1, expected names .* with text as values"),
        (put("SEED", "RINGWEAVE_X"), r"environment variable: 'RINGWEAVE_X', expected a name that does not begin with"),
        (put("3600s", "3600"), r"ttl: '?3600'?, expected a time with a unit.*\[j:15: ttl\]"),
        (put("keep-on-failure", "never"), r"deletion policy: 'never', expected one of delete, keep, keep-on-failure"),
        (put("capacity: 5", "capacity: -5"), r"capacity of node small-.: -5, expected .*\[j:12: nodes\.1\.capacity\]"),
        (put("retries: 5", "retries: -1"), r"max_retries of node big: -1, expected .*\[j:11: nodes\.0\.max_retries\]"),
        (put("count: 2", "count: 0"), r"count: 0, expected 1 to 100000 nodes in all\. .*\[j:12: nodes\.1\.count\]"),
        (
            put("name: small", "name: Small"),
            r"name of a node: 'Small-.', expected a host name.*\[j:12: nodes\.1\.",
        ),
        (put("name: small, capacity: 5, count: 2", "name: big, capacity: 5"), r"'big', expected a name used once"),
        (put("directory: src", "directory:"), r"directory: None, expected the folder that the program needs"),
        (put("suspend: true", "suspend: yes"), r"suspend: 'yes', expected true or false\. .*\[j:16: suspend\]"),
        (put("script: train.py", 'script: ""'), r"script: '', expected a path, such as train\.py\. .*\[j:3: script\]"),
        (put("min_per_node: 2", "min_per_node: 0"), r"minimum per node: 0, expected a whole number"),
        (FULL + "requester: root\n", r"unknown key at the top of the file: 'requester', expected one of"),
    ],
)
def test_wrong_files(text: str, told: str) -> None:
    with pytest.raises(JobError, match=told):
        jobs_request.parse_request(text, source="j")
