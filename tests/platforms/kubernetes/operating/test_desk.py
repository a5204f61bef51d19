"""The desk and an agent's post: orders out, reports in, and nobody without the job's token."""

import asyncio
import threading
import time
from base64 import b64decode
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ringweave.jobs.records import GroupPhase, Job
from ringweave.launcher.workers import HostPort
from ringweave.platforms.agent.agent_channel import RENDEZVOUS_JSON, STATUS_JSON, AgentStatus, RoundOverError
from ringweave.platforms.agent.job_config import JobConfig, NodeConfig, RendezvousResult
from ringweave.platforms.kubernetes import api_client, objects, pod_status
from ringweave.platforms.kubernetes.action_executor import ObservedJob
from ringweave.platforms.kubernetes.agent_gateway import TOKEN_REREAD_INTERVAL_S, AgentGateway
from ringweave.platforms.kubernetes.agent_main import GatewayChannel
from ringweave.platforms.kubernetes.agent_main import GatewayClient as Address
from ringweave.platforms.kubernetes.api_client import KubernetesClient, Object
from ringweave.platforms.kubernetes.objects import JobOwner
from ringweave.platforms.kubernetes.pod_status import JobObjects
from ringweave.rpc import CertificateAuthority
from tests.polling import wait_until

SOON_S = 250.0
UID = "22222222-2222-2222-2222-222222222222"


class Office:
    """A desk in a thread, with one job of one Pod."""

    def __init__(self, kubeconfig: Path, name: str) -> None:
        self.name, self.now_s = name, time.time()
        self._kubeconfig = kubeconfig
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def run(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(SOON_S)

    async def _open(self) -> None:
        environ = {"KUBECONFIG": str(self._kubeconfig)}
        self.client = await KubernetesClient(lambda: api_client.connection_info(environ)).__aenter__()
        self.desk = AgentGateway(self.client, lambda: self.now_s)
        self.runner = await self.desk.start_serving("127.0.0.1", 0, None)
        self.url = f"http://127.0.0.1:{self.runner.addresses[0][1]}"
        resource = {"metadata": {"name": self.name, "namespace": "default", "uid": UID}}
        self.owner = JobOwner.from_resource(resource)
        await self.client.create(api_client.SECRETS, "default", objects.token_secret(self.owner))
        labels = {objects.NODE_LABEL: "0", objects.ATTEMPT_LABEL: "1"}
        metadata = self.owner.metadata(objects.pod_name(self.name, 0, 1), **labels)
        spec = {"containers": [{"name": "workers", "image": "a"}]}
        await self.client.create(api_client.PODS, "default", {"metadata": metadata, "spec": spec})

    async def _close(self) -> None:
        await self.runner.cleanup()
        await self.client.__aexit__(None, None, None)

    def __enter__(self) -> "Office":
        self._thread.start()
        self.run(self._open())
        return self

    def __exit__(self, *_: object) -> None:
        self.run(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(SOON_S)
        self._loop.close()

    def token(self) -> str:
        found = self.run(self.client.get(api_client.SECRETS, "default", objects.config_name(self.name)))
        return b64decode(found["data"][objects.TOKEN_KEY]).decode()

    def pod(self) -> Object:
        return self.run(self.client.get(api_client.PODS, "default", objects.pod_name(self.name, 0, 1)))

    def make_secret_anew(self) -> None:
        self.run(self.client.delete(api_client.SECRETS, "default", objects.config_name(self.name)))
        self.run(self.client.create(api_client.SECRETS, "default", objects.token_secret(self.owner)))

    def address(self) -> Address:
        """With the token as it is now."""
        token = self.token()
        return Address(url=self.url, group=f"default/{self.name}/0/1", token=lambda: token)

    def note(
        self,
        *,
        opening: RendezvousResult | None = None,
        round_: int = 1,
        is_there: bool = True,
        has_config: bool = True,
    ) -> None:
        pod = self.pod()
        pod["metadata"]["annotations"] = {objects.ROUND_ANNOTATION: str(round_)}
        data = {objects.RENDEZVOUS_KEY: RENDEZVOUS_JSON.dump(opening)} if opening else {}
        seen = JobObjects(config={"data": data} if has_config else None, pods={(0, 1): pod} if is_there else {})
        resource = {"metadata": {"name": self.name, "namespace": "default", "uid": UID}}
        job: Job = None  # type: ignore[assignment]
        look = ObservedJob(resource=resource, job=job, objects=seen)
        self._loop.call_soon_threadsafe(self.desk.publish_desired_states, look)

    def channel(self, last_words: Path | None = None) -> GatewayChannel:
        nodes = (NodeConfig(index=0, name="n0", workers=1),)
        config = JobConfig(job=self.name, device="cpu", mode="ps-hra", nodes=nodes, script="s")
        return GatewayChannel(self.address(), config, 0, termination_log=last_words)

    def post(self, last_words: Path | None = None) -> GatewayChannel:
        post = self.channel(last_words)
        post.start_threads()
        return post


@pytest.fixture
def office(kubeconfig: Path, request: pytest.FixtureRequest) -> Iterator[Office]:
    with Office(kubeconfig, "desk" + str(abs(hash(request.node.name)))[:8]) as office:
        yield office


def test_orders_reach_the_agent_and_its_reports_the_pod(office: Office, tmp_path: Path) -> None:
    post = office.post(tmp_path / "last-words")
    assert post.desired_state().round == 0
    office.note()
    wait_until(lambda: post.desired_state().round == 1)
    ready = AgentStatus(round=1, phase=GroupPhase.READY, pid=7, master_address=HostPort(host="10.0.0.1", port=5))
    post.report_status(ready)
    wait_until(lambda: pod_status.agent_status(office.pod()) == ready)
    conditions = {item["type"]: item["status"] for item in office.pod()["status"]["conditions"]}
    assert conditions == {objects.BARRIER_CONDITION: "True"}
    opening = RendezvousResult(round=1, master_address=HostPort(host="10.0.0.1", port=5))
    office.note(opening=opening)
    wait_until(lambda: post.desired_state().rendezvous == opening)
    office.note(opening=opening, round_=2)
    wait_until(lambda: post.desired_state().round == 2)
    last = AgentStatus(round=2, phase=GroupPhase.SUCCEEDED, pid=7, exit_code=0, ended_s=5.0)
    post.report_status(last)
    assert pod_status.agent_status(office.pod()) == replace(last, ended_s=office.now_s), "by the operator's clock"
    assert (tmp_path / "last-words").read_text() == STATUS_JSON.dump(last)
    office.note(is_there=False)
    wait_until(lambda: post.desired_state().stop)
    assert post.desired_state().reason == "its Pod was deleted"


def test_results_alone_are_written_seldom(office: Office) -> None:
    office.note()
    post = office.post()
    wait_until(lambda: post.desired_state().round == 1)
    first = AgentStatus(round=1, phase=GroupPhase.RUNNING, pid=7, iterations=1)
    post.report_status(first)
    wait_until(lambda: pod_status.agent_status(office.pod()) == first)
    address = Address(url=office.url, group=f"default/{office.name}/0/1", token=office.token)
    body = STATUS_JSON.dump(AgentStatus(round=1, phase=GroupPhase.RUNNING, pid=7, iterations=2))
    assert address.request("PUT", "status", body)[0] == 204
    assert pod_status.agent_status(office.pod()) == first


@pytest.mark.parametrize("token", ["", "wrong"])
def test_without_the_token_of_the_job_nothing_is_told(office: Office, token: str) -> None:
    office.note()
    address = Address(url=office.url, group=f"default/{office.name}/0/1", token=lambda: token)
    assert address.request("GET", "desired-state")[0] == 403
    assert address.request("PUT", "status", "{}")[0] == 403
    other = Address(url=office.url, group="default/other/0/1", token=office.token)
    assert other.request("GET", "desired-state")[0] == 403


def test_a_job_that_is_resumed_has_another_token(office: Office) -> None:
    office.note()
    before = office.address()
    wait_until(lambda: before.request("PUT", "status", "{}")[0] == 400)
    office.note(is_there=False, has_config=False)
    office.make_secret_anew()
    office.note()
    after = office.address()
    wait_until(lambda: after.request("PUT", "status", "{}")[0] == 400)
    assert before.request("PUT", "status", "{}")[0] == 403


def test_a_token_that_is_not_the_known_one_is_looked_up_but_not_all_the_time(office: Office) -> None:
    office.note()
    before = office.address()
    wait_until(lambda: before.request("PUT", "status", "{}")[0] == 400)
    office.make_secret_anew()
    after = office.address()
    assert after.request("PUT", "status", "{}")[0] == 403, "the Secret was read just now"
    office.now_s += TOKEN_REREAD_INTERVAL_S
    assert after.request("PUT", "status", "{}")[0] == 400
    assert before.request("PUT", "status", "{}")[0] == 403
    office.now_s += TOKEN_REREAD_INTERVAL_S
    office.run(office.client.delete(api_client.SECRETS, "default", objects.config_name(office.name)))
    assert before.request("PUT", "status", "{}")[0] == 403
    assert after.request("PUT", "status", "{}")[0] == 400, "what cannot be read changes nothing"


def test_what_is_no_latin_is_reported_too(office: Office) -> None:
    office.note()
    post = office.post()
    wait_until(lambda: post.desired_state().round == 1)
    said = AgentStatus(round=1, phase=GroupPhase.INTERRUPTED, pid=7, text="rank 0 raised ValueError: ошибка → é")
    post.report_status(said)
    wait_until(lambda: (seen := pod_status.agent_status(office.pod())) is not None and seen.text == said.text)


def test_what_is_no_report_is_refused(office: Office) -> None:
    office.note()
    address = Address(url=office.url, group=f"default/{office.name}/0/1", token=office.token)
    wait_until(lambda: address.request("PUT", "status", "{}")[0] == 400)


@pytest.mark.parametrize("place", ["0/1" + "0" * 9, "9" * 5000 + "/1", "0/x"])
def test_numbers_that_no_node_has_are_nowhere(office: Office, place: str) -> None:
    office.note()
    address = Address(url=office.url, group=f"default/{office.name}/{place}", token=office.token)
    assert address.request("GET", "desired-state")[0] == 404


def test_a_pod_that_still_starts_a_round_when_the_next_ones_credentials_come_is_called_back(office: Office) -> None:
    """It waited for them until its patience was over, failed, and paid a retry for what another node had done."""
    office.note()
    address = office.address()
    wait_until(lambda: address.request("PUT", "status", "{}")[0] == 400)
    body = objects.credential_secret(
        office.owner, objects.credential_pool_name(office.name, 0), (2, 1), {"worker-0.0": "zero"}
    )
    office.run(office.client.create(api_client.SECRETS, "default", body))
    with pytest.raises(RoundOverError, match=rf"'410 round 1 of job {office.name} is over: round 2 has begun'"):
        office.channel().take_credentials(1, "worker-0")


def test_spare_credentials_are_taken_from_a_nodes_secret_until_none_is_left(office: Office) -> None:
    office.note()
    address, authority = office.address(), CertificateAuthority("job")
    wait_until(lambda: address.request("PUT", "credentials/1/0", "{}")[0] == 409)
    assert address.request("PUT", "credentials/1/0", "[]")[0] == 400
    issued = {f"worker-0.{life}": authority.issue("worker", f"0.{life}").to_text() for life in range(2)}
    body = objects.credential_secret(office.owner, objects.credential_pool_name(office.name, 0), (1, 1), issued)
    office.run(office.client.create(api_client.SECRETS, "default", body))
    # Each is another agent's: what one has taken none gets again.
    taken = [office.channel().take_credentials(1, "worker-0").identity.name for _ in range(2)]
    assert taken == ["0.0", "0.1"]
    text = rf"'410 round 1 of job {office.name}: no credentials are left for worker-0', expected a current round"
    with pytest.raises(RoundOverError, match=text):
        office.channel().take_credentials(1, "worker-0")
