"""Parsers of bytes that come from another process or from a file, with good messages to begin mutations from.

`docs/reference/protocols.md` lists the same parsers with their limits. A parser either returns a value or raises one of
its `refusals`; anything else is a finding of `bench/fuzz.py`.
"""

import base64
import functools
import json
import socket
import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from subprocess import CompletedProcess
from types import SimpleNamespace
from typing import Any

import numpy as np
import pydantic
import safetensors.torch
import torch
import xxhash
from torch import nn

from ringweave import planning, rpc, schedules, topology
from ringweave.comm import failure_registry, gloo, group_info, group_plan, peer_data
from ringweave.comm.engine import executor
from ringweave.comm.group_info import GroupInfo, RankInfo, RankLocation
from ringweave.comm.probing import network_measurement, probe_coordinator
from ringweave.comm.transport import connect, shared_memory
from ringweave.comm.transport.interface import MismatchError
from ringweave.comm.transport.sockets import TcpConnection
from ringweave.cost.network import load_measured_rates
from ringweave.errors import RingweaveError
from ringweave.files import file_io
from ringweave.jobs import admission, records, request
from ringweave.lab import lab_state
from ringweave.launcher import run_dir, scale_requests
from ringweave.param_server import leadership, replication, snapshots  # noqa: F401 - messages of standbys
from ringweave.pipeline import checkpoints as pipeline_checkpoints
from ringweave.pipeline import migration
from ringweave.pipeline.runtime import boundaries
from ringweave.planning.autotune.tuning_messages import SurveyStream, TuningDecision
from ringweave.planning.repartition.controller import MeasurementWindow, RepartitionDecision
from ringweave.platforms import api
from ringweave.platforms.agent import agent_channel, job_config
from ringweave.platforms.hosts import host_list, join_protocol, relay, run_entry, script_files
from ringweave.platforms.hosts.ssh import SshConnection
from ringweave.platforms.slurm.commands import SlurmClient
from ringweave.rpc import framing
from ringweave.rpc.channel import RpcChannel
from ringweave.rpc.server import uninitialized_buffers
from ringweave.rpc.tls import Credentials, Identity
from ringweave.schedules import wire_formats
from ringweave.sim import pipeline_schedules, scenario
from ringweave.sim.pipeline_simulation import StageDevices
from ringweave.telemetry import events
from ringweave.telemetry.kinds import EVENTS_FORMAT
from ringweave.topology.discovery import safe_xml
from ringweave.training import collectives, speed_test
from ringweave.training.checkpoints import store as checkpoint_store
from ringweave.training.elastic import member_details, recovery, share_table
from ringweave.training.elastic.script_collectives import CollectiveResult
from ringweave.training.rings import ring_progress, static_ring

EXAMPLES = Path(__file__).parents[2] / "examples" / "clusters"
DAMAGE_ERRORS = (safetensors.SafetensorError, OSError, ValueError, TypeError, AttributeError, RingweaveError)
"""What a block's file may raise; `_load_block` turns it into one error."""
_FOLDER = tempfile.TemporaryDirectory(prefix="ringweave-fuzz-")
"""Files of parsers of files; removed when the process ends."""
CODE_ERRORS = (ValueError, RingweaveError)
"""What a parser may raise whose caller turns it into an error of its own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UntrustedParser:
    """One parser."""

    name: str
    parse: Callable[[bytes], object]
    seeds: tuple[bytes, ...]
    """Good messages."""
    refusals: tuple[type[Exception], ...] = (RingweaveError,)
    """Errors that are a refusal."""
    is_slow: bool = False
    """It takes more than a millisecond: it gets a tenth of the mutations."""


def text_parser(name: str, parse: Callable[[str], object], *seeds: str, **options: Any) -> UntrustedParser:
    """Return a parser of text."""
    return UntrustedParser(
        name=name,
        parse=lambda data: parse(data.decode("utf-8", "replace")),
        seeds=tuple(seed.encode() for seed in seeds),
        **options,
    )


def file_parser(name: str, load: Callable[[Path], object], *seeds: bytes, **options: Any) -> UntrustedParser:
    """Return a parser of a file."""
    folder = Path(tempfile.mkdtemp(dir=_FOLDER.name))

    def parse(data: bytes) -> object:
        path = folder / name
        path.write_bytes(data)
        return load(path)

    return UntrustedParser(name=name, parse=parse, seeds=seeds, **options)


def schema_sample(schema: Mapping[str, Any], defs: Mapping[str, Any], depth: int = 0) -> Any:
    """Return a value of a JSON schema, with one item in each list and map."""
    if "$ref" in schema:
        return schema_sample(defs[schema["$ref"].rpartition("/")[2]], defs, depth + 1)
    for key in ("anyOf", "oneOf", "allOf"):
        if key in schema:
            return schema_sample(schema[key][0], defs, depth + 1)
    if "const" in schema or "enum" in schema:
        return schema.get("const", schema.get("enum", [None])[0])
    if "prefixItems" in schema:
        return [schema_sample(each, defs, depth + 1) for each in schema["prefixItems"]]
    if schema.get("type") == "object":
        fields = {key: schema_sample(each, defs, depth + 1) for key, each in schema.get("properties", {}).items()}
        more = schema.get("additionalProperties")
        return fields or ({"key": schema_sample(more, defs, depth + 1)} if isinstance(more, dict) else {})
    if schema.get("type") == "array":
        return [schema_sample(schema.get("items", {}), defs, depth + 1)] if depth < 12 else []
    plain = {"number": 0.5, "boolean": True, "null": None, "integer": max(1, schema.get("minimum", 1))}
    return plain.get(str(schema.get("type")), "text")


def sample_of(kind: Any) -> str:
    """Return JSON of a type, as its schema says."""
    schema = pydantic.TypeAdapter(kind).json_schema()
    return json.dumps(schema_sample(schema, schema.get("$defs", {})))


def all_message_classes(base: type[rpc.RpcMessage] = rpc.RpcMessage) -> Iterator[type[rpc.RpcMessage]]:
    """Yield all classes of RPC messages of the package."""
    for each in base.__subclasses__():
        if each.__module__.startswith("ringweave.") and "kind" in vars(each):
            yield each
        yield from all_message_classes(each)


def untrusted_parsers() -> list[UntrustedParser]:
    """Return all parsers."""
    groups = (rpc_parsers(), store_parsers(), transport_parsers(), plan_parsers(), training_parsers())
    return [each for group in (*groups, file_parsers(), platform_parsers()) for each in group]


def rpc_parsers() -> list[UntrustedParser]:
    """Return the parsers of RPC, its certificates and its tokens."""
    authority = rpc.CertificateAuthority("job")
    credentials = authority.issue("host", "0")
    token = join_protocol.JoinToken.create(credentials.authority_pem)
    der = _der_of(credentials.certificate_pem)
    ack = framing.pack_frame(framing.FrameKind.CALL, call=1, name="test.add", body=b'{"number":1}', sizes=[2])
    frame = ack + b"ab" + framing.pack_checksum(framing.checksum(memoryview(b"ab")))
    texts = (
        text_parser("rpc identity", Identity.parse, str(credentials.identity)),
        text_parser("rpc credentials", Credentials.from_text, credentials.to_text()),
        text_parser("join line", join_protocol.JoinLine.parse, f"127.0.0.1:5000#{token}", f"[::1]:5000#{token}"),
        text_parser("join credentials", token.unseal, token.seal([credentials]), refusals=CODE_ERRORS),
    )
    messages = [
        UntrustedParser(
            name=f"rpc message {each.kind}",
            parse=functools.partial(framing.decode_message, each),
            seeds=(sample_of(each).encode(),),
        )
        for each in sorted(set(all_message_classes()), key=lambda each: each.kind)
    ]
    return [
        UntrustedParser(name="rpc frame", parse=_read_frame, seeds=(frame,)),
        UntrustedParser(name="rpc frame, right checks", parse=_read_checked_frame, seeds=(frame,)),
        UntrustedParser(
            name="host certificate",
            parse=lambda data: join_protocol.verify_host_certificate(data, token.authority_key),
            seeds=(der,),
        ),
        *texts,
        *messages,
    ]


_RPC_LIMITS = rpc.RpcLimits(max_message_bytes=1 << 16, max_body_bytes=4096, max_bytes_in_flight=1 << 20)


def _der_of(pem: str) -> bytes:
    return base64.b64decode("".join(pem.strip().splitlines()[1:-1]))


def _read_frame(data: bytes) -> object:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(data[:65536])
        theirs.close()
        channel = RpcChannel(ours, _RPC_LIMITS, "fuzz")
        head = channel.receive_head()
        return channel.receive_content(head.prefix, uninitialized_buffers(head.sizes))


def _read_checked_frame(data: bytes) -> object:
    """Read a frame whose prefix and head have the checksums of their bytes: as of one who knows the format."""
    fields = framing.PREFIX_BYTES - framing.CHECKSUM_BYTES
    prefix = data[:fields].ljust(fields, b"\0")
    body = data[framing.PREFIX_BYTES :]
    parsed = framing.parse_prefix(prefix + framing.pack_checksum(framing.checksum(memoryview(prefix))), _RPC_LIMITS)
    head = body[: 8 * parsed.num_buffers + parsed.name_bytes + parsed.body_bytes]
    head = head.ljust(8 * parsed.num_buffers + parsed.name_bytes + parsed.body_bytes, b"\0")
    found = framing.parse_head(parsed, head + framing.pack_checksum(framing.checksum(memoryview(head))))
    return uninitialized_buffers(found.sizes)


def store_parsers() -> list[UntrustedParser]:
    """Return the parsers of what ranks put into the store, or send each other before a group exists."""
    place = ["n0", "127.0.0.1", ["10.0.0.1"], [1.0, 2.0], ["eth0"], ["10.0.0.0/24"], "host", 0.25, ["0"]]
    entry: dict[str, Any] = {
        "location": place,
        "endpoints": [[[5000], "name"]],
        "token": "00" * 16,
        "fingerprint": "ab",
    }
    entry["versions"] = group_info.own_versions()
    report = {"operation": "allreduce", "suspect": 1, "is_hung": True, "failure": "", "disagreement": ""}
    plan = str(planning.plan_group(topology.one_machine([2]), ["node0"] * 2))
    measured = json.loads(sample_of(network_measurement.NetworkMeasurement))
    take = functools.partial(speed_test._parse_report, world_size=4)
    shared = json.dumps({"plan": plan, "tuned": {"3": "ring"}})

    def decoded(name: str, convert: Callable[[Any], object], *seeds: str) -> UntrustedParser:
        return UntrustedParser(
            name=name,
            parse=lambda data: peer_data.decode_peer_data(data, name, convert, expected="it"),
            seeds=tuple(seed.encode() for seed in seeds),
        )

    return [
        UntrustedParser(
            name="entry of a rank",
            parse=lambda data: group_info.parse_rank_info(data, 0),
            seeds=(json.dumps(entry).encode(),),
        ),
        UntrustedParser(
            name="failure report", parse=failure_registry.parse_failure_report, seeds=(json.dumps(report).encode(),)
        ),
        UntrustedParser(
            name="door of Gloo", parse=lambda data: gloo._parse_door(data, 0), seeds=(b'["127.32.1.1", 5000, 5001]',)
        ),
        decoded("plan of the group", group_plan._parse_shared_plan, shared),
        decoded("speed test report", take, "[3, 0.25]", "[0, null]"),
        decoded("control message", peer_data.require_object, '{"step": 3, "check": "ab"}'),
        UntrustedParser(name="probing line", parse=_receive_probing, seeds=(_PROBING,)),
        text_parser(
            "network measurement",
            network_measurement.measurement_from_json,
            json.dumps(measured | {"cluster_text": topology.dumps(topology.one_machine([2]))}),
            refusals=(ValueError,),
        ),
    ]


_PROBING = json.dumps(
    {"do": "reach", "peers": [1], "rail": 0, "number": 3, "sends_to": [], "receives_from": [], "rails": []}
).encode()


def _receive_probing(data: bytes) -> object:
    ours, theirs = socket.socketpair()
    with theirs:
        theirs.sendall(data[:65536] + b"\n")
        connection = probe_coordinator.JsonConnection(ours, "rank 0")
        try:
            return connection.receive()
        finally:
            connection.close()


def transport_parsers() -> list[UntrustedParser]:
    """Return the parsers of ringweave's sockets and shared memory, and of encoded values."""
    intent = dict.fromkeys(executor.CollectiveIntent.__dataclass_fields__, "1")
    hello = connect._HELLO.pack(b"0" * 16, 1, 0)
    frames = [shared_memory._FRAME.pack(kind, 7, 4, 64) for kind in range(1, 8)]
    header = (7).to_bytes(8, "little") + (8).to_bytes(8, "little")
    relay_lines = [
        {"listen": {"127.64.0.1": [5000]}, "serial": 1},
        {"open": 1, "address": "127.64.0.1", "port": 5000},
        {"failed": 1},
        {"done": 1, "taken": [5000]},
    ]
    return [
        UntrustedParser(
            name="transport header",
            parse=_receive_pieces,
            seeds=(header + b"contents",),
            refusals=(MismatchError, ConnectionResetError),
        ),
        UntrustedParser(name="transport hello", parse=_identify_caller, seeds=(hello,)),
        UntrustedParser(
            name="shared-memory frame",
            parse=_read_shm_frames,
            seeds=tuple(frames),
            refusals=(RingweaveError, OSError, MismatchError),
        ),
        UntrustedParser(
            name="collective intent",
            parse=lambda data: executor._unpack_intent(torch.frombuffer(bytearray(data or b" "), dtype=torch.uint8)),
            seeds=(json.dumps(intent).encode(),),
        ),
        *(
            UntrustedParser(
                name=f"wire format {each.name}",
                parse=functools.partial(_decode_values, each),
                seeds=(bytes(each.encoded_bytes(64)),),
            )
            for each in (wire_formats.format_named(name) for name in ("bf16", "int8", "int4"))
        ),
        *(
            UntrustedParser(
                name=f"message between stages in {wire}",
                parse=functools.partial(_decode_boundary, wire),
                seeds=(boundaries.encode(wire, torch.ones(24, 16)).numpy().tobytes(),),
            )
            for wire in ("bf16", "int8")
        ),
        UntrustedParser(
            name="relay line",
            parse=_handle_relay_line,
            seeds=tuple(json.dumps(each).encode() for each in relay_lines),
            refusals=(OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError),
        ),
    ]


def _decode_values(each: wire_formats.WireFormat, data: bytes) -> object:
    values = np.zeros(64, np.float32)
    wire_formats.decode(each, np.frombuffer(data, np.uint8), values)
    return values


def _decode_boundary(wire: str, data: bytes) -> object:
    values = torch.zeros(24, 16)
    boundaries.decode(wire, torch.frombuffer(bytearray(data or b" "), dtype=torch.uint8), values)
    return values


def _receive_pieces(data: bytes) -> object:
    room = bytearray(b"-" * 8 + b"keep")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        theirs = socket.create_connection(listener.getsockname())
        ours, _ = listener.accept()
    with ours:
        theirs.sendall(data[:65536])
        theirs.close()
        connection = TcpConnection(0, ours)
        message = connection.receive(memoryview(room)[:8], 7)
        try:
            while not message.done:
                connection.read()
        finally:
            assert room[8:] == b"keep", "written past the piece"
    return bytes(room)


def _identify_caller(data: bytes) -> object:
    place = RankLocation("n", "127.0.0.1", (), (1.0,))
    ranks = tuple(RankInfo(rank, place, ()) for rank in range(3))
    manager = connect.ConnectionManager.__new__(connect.ConnectionManager)
    manager._group, manager._channel = GroupInfo(ranks, 2, b"0" * 16), 0
    ours, theirs = socket.socketpair()
    with theirs:
        found = manager._identify(data[: connect._HELLO.size].ljust(connect._HELLO.size, b"\0"), ours)
        ours.close()
    assert found is None or found[0] in (0, 1), "a rank that there is not"
    return found


def _read_shm_frames(data: bytes) -> object:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        connection = shared_memory.ShmConnection(1, ours, lambda: None)
        handle = connection.receive(4, 7)
        for start in range(0, min(len(data), 1024), shared_memory._FRAME.size):
            theirs.send(data[start : start + shared_memory._FRAME.size])
        theirs.close()
        connection.read()
        return handle.done


def _handle_relay_line(data: bytes) -> object:
    message = file_io.parse_json(data)
    link = SimpleNamespace(host=0, send=lambda **_: None)
    spawned: list[Any] = []
    relayed: Any = relay.Relay.__new__(relay.Relay)
    relayed._carried, relayed._leading = {}, set()
    relayed._load_hosts = lambda: [SimpleNamespace(node="a")]
    relayed._spawn = lambda work, *_: spawned.append(work)
    try:
        if message.get("done") is not None:
            return frozenset(map(int, message["taken"]))
        relayed._handle(link, message)
    finally:
        for work in spawned:
            work.close()
    return None


def plan_parsers() -> list[UntrustedParser]:
    """Return the parsers of plans, schedules and decisions."""
    plan = planning.plan_group(topology.one_machine([2]), ["node0"] * 2)
    schedule = schedules.generate("ring", 4)
    decision = TuningDecision(num_bytes=5, schedule="ring", phases=((SurveyStream(0, 1, 2),),))
    window = MeasurementWindow(first_step=1, compute_s=((1.0, 2.0),), step_s=(1.0,))
    pipeline = pipeline_schedules.generate_pipeline_schedule("1f1b", 2, 4)
    return [
        text_parser("plan", planning.Plan.parse, str(plan)),
        text_parser("tuning decision", TuningDecision.parse, str(decision)),
        text_parser("measurement window", MeasurementWindow.parse, str(window)),
        text_parser("repartition decision", RepartitionDecision.parse, str(RepartitionDecision(splits=(1, 2)))),
        text_parser("schedule", schedules.parse, str(schedule)),
        text_parser("pipeline schedule", pipeline_schedules.parse_pipeline_schedule, str(pipeline)),
        text_parser("stage devices", StageDevices.parse, "0:2+1:2 2:4"),
    ]


def training_parsers() -> list[UntrustedParser]:
    """Return the parsers of what members of a training job send each other."""
    layout = recovery.layout_to_text([(1024, "float32", "cpu"), (16, "bfloat16", "cuda")])
    result = CollectiveResult(
        digest=1,
        kind="allreduce",
        members=("0.0", "1.0"),
        has_part=(True, True),
        rows=torch.ones(2, 8, dtype=torch.uint8),
    )
    shares = share_table.shares_to_text([share_table.BatchShares(first_batch=0, members=("0.0",), shares=(4,))])
    header = {
        "error": "",
        "parts": {
            "parameter weight": {"shape": [2, 2], "dtype": "float32"},
            "extra x": {"shape": [3], "dtype": "uint8"},
        },
        "facts": {"optimizer": {}},
    }
    optimizer_state = [{"map": [[0, {"map": [["step", {"tensor": "a"}]]}]]}, [["a", "float32", [2, 3]]]]
    account, numbers = [1, 2], [3, 1, 2, 0, 1]
    cursor = ring_progress.RingCursor(ring=0)
    note = sample_of(member_details._SessionDetails).replace('"store": "text"', '"store": "127.0.0.1 5000"')

    def loaded(name: str, take: Callable[[Any], object], *seeds: Any) -> UntrustedParser:
        return UntrustedParser(
            name=name,
            parse=lambda data: peer_data.decode_peer_data(data, name, take, expected="it"),
            seeds=tuple(json.dumps(seed).encode() for seed in seeds),
        )

    return [
        text_parser("layout of buckets", recovery.layout_of_text, layout),
        text_parser(
            "layout of buckets, packed",
            lambda text: recovery.layout_of_text(base64.b64encode(zlib.compress(text.encode())).decode()),
            json.dumps([[1024, "float32", "cpu"]]),
        ),
        text_parser("shares of batches", share_table.shares_of_text, shares),
        text_parser("details of a member", lambda text: member_details.parse_details("0.0", text), note),
        text_parser("profile of a member", lambda text: member_details.parse_profile("0.0", text), '{"a": [1, 2]}'),
        UntrustedParser(
            name="result of a collective",
            parse=lambda data: CollectiveResult.of_json(file_io.parse_json(data)),
            seeds=(json.dumps(result.to_json()).encode(),),
            refusals=(ValueError, KeyError, TypeError, OverflowError, RuntimeError, AttributeError),
        ),
        loaded("optimizer of a ring", lambda each: static_ring._parse_optimizer_state(each, 1000), optimizer_state),
        loaded("cursor of a ring", cursor.load_json, [*numbers, None, None]),
        loaded("account", lambda each: [tuple(map(int, pair)) for pair in each], [account, account]),
        loaded("block header", lambda each: migration.BlockReceiver(each, nn.Linear(2, 2)), header),
        UntrustedParser(
            name="control text",
            parse=lambda data: collectives._parse_json(torch.frombuffer(bytearray(data or b" "), dtype=torch.uint8), 1),
            seeds=(b'{"failure": ""}',),
        ),
    ]


def file_parsers() -> list[UntrustedParser]:
    """Return the parsers of files of a run, and of files that people write."""
    cluster = (EXAMPLES / "two-racks.yaml").read_bytes()
    job = b"name: text\ngpus: 15\nscript: train.py\nnodes:\n  - {name: big, capacity: 10, max_retries: 5}\n"
    policy = b"rules:\n  - {users: [ann], max_gpus: 4}\n"
    event = json.dumps({"time": 1.5, "kind": "run_started", "format": EVENTS_FORMAT, "workers": 4}).encode() + b"\n"
    run_json = json.dumps(
        {"format": run_dir.RUN_JSON_FORMAT, "outcome": "running", "launcher": {"pid": 1}, "elastic": None}
    ).encode()
    network = topology.loads(cluster.decode())
    rates = json.dumps({"links": [{"name": network.links()[0].name, "rate_bytes_per_s": 1e9}]}).encode()
    lab = {"name": "a", "quotas": {"a": [0.5, 0.5]}, "hierarchy": {"version": 2, "root": "/sys/fs/cgroup"}}
    return [
        file_parser("cluster file", topology.load, cluster, is_slow=True),
        file_parser("job file", request.load_request, job, is_slow=True),
        file_parser("policy file", admission.load_policy, policy, is_slow=True),
        file_parser("events.jsonl", lambda path: list(events.read_events(path)), event),
        file_parser("run.json", run_dir._read_run_json, run_json),
        UntrustedParser(
            name="scale request", parse=scale_requests._parse_request, seeds=(b'{"request_id": "a", "workers": 3}',)
        ),
        file_parser("measured rates", lambda path: load_measured_rates(path, network), rates),
        file_parser("host costs", scenario.load_host_costs, b'{"costs": {"message_s": 1e-5, "start_s": 0.1}}'),
        file_parser("lab record", _read_lab, json.dumps(lab).encode()),
        UntrustedParser(name="hwloc topology", parse=lambda data: safe_xml.parse_xml(data, "fuzz"), seeds=(_XML,)),
        *checkpoint_parsers(),
    ]


_XML = (
    b'<?xml version="1.0"?><topology version="2.0"><object type="Machine" os_index="0">'
    b'<info name="a" value="b"/></object></topology>'
)


def _read_lab(path: Path) -> object:
    folder, lab_state.lab_folder = lab_state.lab_folder, lambda name: path.parent
    try:
        path.replace(path.parent / "lab.json")
        return lab_state.read_record("a")
    finally:
        lab_state.lab_folder = folder


def checkpoint_parsers() -> list[UntrustedParser]:
    """Return the parsers of checkpoints and snapshots; checksums are those of the mutated bytes."""
    folder = Path(tempfile.mkdtemp(dir=_FOLDER.name))
    tensors = {"model.a": torch.ones(4), "rng": torch.zeros(3, dtype=torch.uint8)}
    document = {
        "format": checkpoint_store.FORMAT,
        "train_step": 3,
        "world_size": 2,
        "parts": {"model": {"map": [["a", {"tensor": "model.a"}]]}, "rest": {"tuple": [1, {"bytes": "00ff"}]}},
    }
    whole = safetensors.torch.save(tensors, {checkpoint_store.METADATA_KEY: json.dumps(document)})
    parts = {"model/weight": torch.ones(2, 2), "optimizer/0/step": torch.ones(1), "extra/a": torch.ones(1)}
    block = safetensors.torch.save(parts, {"optimizer": json.dumps({"0": {"step": 3}})})

    def read(data: bytes) -> object:
        path = folder / "checkpoint.safetensors"
        path.write_bytes(data)
        saved = checkpoint_store.CheckpointFile(
            path=path, train_step=3, rank=0, checksum=xxhash.xxh3_64_hexdigest(data)
        )
        return checkpoint_store.read_checkpoint(saved)

    snapshot = {"format": snapshots._SNAPSHOT_FORMAT, "setup": json.loads(sample_of(snapshots.ServerSetup))}
    return [
        UntrustedParser(name="checkpoint", parse=read, seeds=(whole,)),
        UntrustedParser(name="snapshot", parse=snapshots.snapshot_from_bytes, seeds=(whole,)),
        text_parser("snapshot, metadata", lambda text: snapshots.snapshot_from_parts(text, {}), json.dumps(snapshot)),
        file_parser(
            "checkpoint of a block",
            pipeline_checkpoints._read_block,
            block,
            refusals=DAMAGE_ERRORS,
        ),
    ]


def platform_parsers() -> list[UntrustedParser]:
    """Return the parsers of records of jobs, and of what agents, hosts and services send each other."""
    documents = [
        ("job record", records.RECORD_JSON.parse, records.JobRecord),
        ("agent status", agent_channel.STATUS_JSON.parse, agent_channel.AgentStatus),
        ("desired state", agent_channel.DESIRED_STATE_JSON.parse, agent_channel.DesiredState),
        ("rendezvous", agent_channel.RENDEZVOUS_JSON.parse, job_config.RendezvousResult),
        ("job config", job_config.JOB_CONFIG_JSON.parse, job_config.JobConfig),
        ("run entry", run_entry.ENTRY_JSON.parse, run_entry.RunEntry),
        ("host config", run_entry.HOST_CONFIG_JSON.parse, run_entry.HostConfig),
        ("leadership record", leadership.parse_record, leadership.LeadershipRecord),
        ("leadership answer", leadership.parse_answer, leadership.LogAnswer),
    ]
    with_format = {"job record", "run entry", "job config"}
    files = json.dumps([["train.py", "0" * 64, 420], ["a/b", "1" * 64, 420]])
    log_line = {"node": "a", "attempt": 1, "round": 1, "rank": 0, "text": "x"}
    return [
        *(
            text_parser(
                name,
                parse,
                records.add_format(sample_of(kind).encode()).decode() if name in with_format else sample_of(kind),
                refusals=CODE_ERRORS,
            )
            for name, parse, kind in documents
        ),
        text_parser(
            "job view",
            lambda text: api.parse_job_view(file_io.parse_json(text)),
            sample_of(api.JobView),
            refusals=CODE_ERRORS,
        ),
        text_parser(
            "files of a run",
            lambda text: script_files.check_file_list(file_io.parse_json(text)),
            files,
            refusals=CODE_ERRORS,
        ),
        text_parser("answer over ssh", _parse_ssh_answer, json.dumps({"found": True, "size": 0})),
        text_parser("hosts", _parse_hosts, "a:2,user@b:1,join:1"),
        *slurm_parsers(),
        text_parser(
            "log line of a service",
            lambda text: api.LogLine(**file_io.parse_json(text)),
            json.dumps(log_line),
            refusals=(ValueError, TypeError),
        ),
    ]


def _parse_hosts(text: str) -> object:
    return host_list.parse_hosts(text.removesuffix(".yaml").removesuffix(".yml"))


def _parse_ssh_answer(text: str) -> object:
    connection: Any = SshConnection.__new__(SshConnection)
    connection.host = SimpleNamespace(node="a")
    return connection._parse_object(text.encode())


def slurm_parsers() -> list[UntrustedParser]:
    """Return the parsers of what Slurm's commands print."""
    job = "JobId=12 JobName=a JobState=RUNNING Reason=None Restarts=0 StartTime=2026-01-01T00:00:00 NodeList=a[1-2]\n"

    def parse(call: Callable[[Any], object]) -> Callable[[str], object]:
        def run(text: str) -> object:
            slurm = SlurmClient(lambda *_: CompletedProcess([], returncode=0, stdout=text, stderr=""))
            return call(slurm)

        return run

    return [
        text_parser("scontrol show job", parse(lambda slurm: slurm.get_allocation(12)), job),
        text_parser("squeue", parse(lambda slurm: slurm.find_job_id("a", "c")), "12|c\n13|d\n"),
        text_parser(
            "sinfo", parse(lambda slurm: slurm.list_hosts()), "a|4|gpu:2|idle|debug*\nb|8+|(null)|mix|debug*\n"
        ),
    ]
