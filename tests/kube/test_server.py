"""What the operator takes for granted of an API server; the fake has to pass as a real one does."""

import asyncio
import json
from typing import Any

import pytest

from ringweave.platforms.kubernetes import api_client, objects
from ringweave.platforms.kubernetes.api_client import ApiError, Object
from tests.kube.conftest import SOON_S, Kube


def config_map(kube: Kube, name: str, **metadata: Any) -> Object:
    body = {"metadata": {"name": name, **metadata}, "data": {"a": "1"}}
    return kube.run(kube.client.create(api_client.CONFIG_MAPS, kube.namespace, body))


def remove(kube: Kube, name: str) -> None:
    kube.run(kube.client.delete(api_client.CONFIG_MAPS, kube.namespace, name))


def test_a_name_is_given_once(kube: Kube) -> None:
    config_map(kube, "once")
    with pytest.raises(ApiError, match="already exists") as caught:
        config_map(kube, "once")
    assert caught.value.already_exists
    assert not caught.value.is_stale
    remove(kube, "once")


def test_a_stale_version_conflicts(kube: Kube) -> None:
    first = config_map(kube, "stale")
    second = kube.run(kube.client.replace(api_client.CONFIG_MAPS, kube.namespace, {**first, "data": {"a": "2"}}))
    assert second["metadata"]["resourceVersion"] != first["metadata"]["resourceVersion"]
    with pytest.raises(ApiError, match="modified") as caught:
        kube.run(kube.client.replace(api_client.CONFIG_MAPS, kube.namespace, {**first, "data": {"a": "3"}}))
    assert caught.value.is_stale
    body = {"metadata": {"resourceVersion": first["metadata"]["resourceVersion"]}, "data": {"a": "4"}}
    with pytest.raises(ApiError, match="modified") as caught:
        kube.run(kube.client.patch(api_client.CONFIG_MAPS, kube.namespace, "stale", body))
    assert caught.value.is_stale
    remove(kube, "stale")


def test_a_change_that_changes_nothing_makes_no_version(kube: Kube) -> None:
    first = config_map(kube, "same")
    again = kube.run(kube.client.replace(api_client.CONFIG_MAPS, kube.namespace, first))
    assert again["metadata"]["resourceVersion"] == first["metadata"]["resourceVersion"]
    remove(kube, "same")


def test_another_uid_is_another_object(kube: Kube) -> None:
    config_map(kube, "other")
    with pytest.raises(ApiError) as caught:
        kube.run(
            kube.client.request(
                "DELETE",
                api_client.CONFIG_MAPS.path(kube.namespace, "other"),
                body={"preconditions": {"uid": "11111111-1111-1111-1111-111111111111"}},
            )
        )
    assert caught.value.is_stale
    body = {"metadata": {"uid": "11111111-1111-1111-1111-111111111111"}, "data": {"a": "4"}}
    with pytest.raises(ApiError, match=r"metadata\.uid") as caught:
        kube.run(kube.client.patch(api_client.CONFIG_MAPS, kube.namespace, "other", body))
    assert caught.value.is_stale
    remove(kube, "other")


def test_a_finalizer_keeps_what_is_deleted(kube: Kube) -> None:
    config_map(kube, "kept", finalizers=["ringweave.dev/test"])
    remove(kube, "kept")
    found = kube.run(kube.client.get(api_client.CONFIG_MAPS, kube.namespace, "kept"))
    assert "deletionTimestamp" in found["metadata"]
    body: Object = {"metadata": {"finalizers": None}}
    kube.run(kube.client.patch(api_client.CONFIG_MAPS, kube.namespace, "kept", body))
    with pytest.raises(ApiError, match="not found") as caught:
        kube.run(kube.client.get(api_client.CONFIG_MAPS, kube.namespace, "kept"))
    assert caught.value.is_not_found


def test_labels_select(kube: Kube) -> None:
    config_map(kube, "red", labels={"colour": "red", "size": "1"})
    config_map(kube, "blue", labels={"colour": "blue", "size": "1"})

    def found(selector: str) -> list[str]:
        listed = kube.run(kube.client.list(api_client.CONFIG_MAPS, kube.namespace, labelSelector=selector))
        return [item["metadata"]["name"] for item in listed]

    assert found("colour=red") == ["red"]
    assert found("size=1,colour!=red") == ["blue"]
    assert found("colour in (red,blue)") == ["blue", "red"]
    assert found("colour,!size") == []
    by_field = kube.run(kube.client.list(api_client.CONFIG_MAPS, kube.namespace, fieldSelector="metadata.name=blue"))
    assert [item["metadata"]["name"] for item in by_field] == ["blue"]
    assert "kind" not in by_field[0], "what is built in says its kind in no list"
    remove(kube, "red")
    remove(kube, "blue")


def test_a_config_map_of_more_than_a_mebibyte_is_refused(kube: Kube) -> None:
    body = {"metadata": {"name": "large"}, "data": {"a": "x" * (2**20 + 1)}}
    with pytest.raises(ApiError, match="Too long") as caught:
        kube.run(kube.client.create(api_client.CONFIG_MAPS, kube.namespace, body))
    assert caught.value.is_refusal


def test_a_watch_tells_what_enters_changes_and_leaves_the_selection(kube: Kube) -> None:
    listed = kube.run(kube.client.request("GET", api_client.CONFIG_MAPS.path(kube.namespace)))
    params = {
        "watch": "true",
        "resourceVersion": listed["metadata"]["resourceVersion"],
        "labelSelector": "watched=yes",
        "timeoutSeconds": str(int(SOON_S)),
    }

    async def follow() -> list[str]:
        told = []
        async for line in kube.client.stream_lines(api_client.CONFIG_MAPS.path(kube.namespace), params):
            event = json.loads(line)
            if event["type"] != "BOOKMARK":
                told.append(event["type"])
            if len(told) == 4:
                break
        return told

    async def both() -> list[str]:
        following = asyncio.create_task(follow())
        body = {"metadata": {"name": "seen", "labels": {"watched": "yes"}}, "data": {"a": "1"}}
        client, where = kube.client, kube.namespace
        await client.create(api_client.CONFIG_MAPS, where, body)
        await client.patch(api_client.CONFIG_MAPS, where, "seen", {"data": {"a": "2"}})
        await client.patch(api_client.CONFIG_MAPS, where, "seen", {"metadata": {"labels": {"watched": "no"}}})
        await client.patch(api_client.CONFIG_MAPS, where, "seen", {"metadata": {"labels": {"watched": "yes"}}})
        await client.delete(api_client.CONFIG_MAPS, where, "seen")
        async with asyncio.timeout(SOON_S):
            return await following

    assert kube.run(both()) == ["ADDED", "MODIFIED", "DELETED", "ADDED"]


def test_a_watch_from_before_what_is_remembered_expires(kube: Kube) -> None:
    # The definition of TrainingJobs is younger than the first version of all.
    params = {"watch": "true", "resourceVersion": "1", "timeoutSeconds": str(int(SOON_S))}

    async def first() -> tuple[str, int]:
        try:
            async for line in kube.client.stream_lines(api_client.TRAINING_JOBS.path(kube.namespace), params):
                event = json.loads(line)
                return event["type"], event["object"].get("code")
        except ApiError as error:  # a server may also refuse it outright
            return "ERROR", error.status
        return "", 0

    assert kube.run(first()) == ("ERROR", 410)


def test_of_status_and_spec_each_is_written_alone(kube: Kube) -> None:
    job = kube.submit("apart", managedBy="somebody/else")
    status = {"state": "Pending", "message": "a message"}
    changed = {**job, "spec": {**job["spec"], "suspend": True}, "status": status}
    after = kube.run(kube.client.replace(api_client.TRAINING_JOBS, kube.namespace, changed))
    assert "status" not in after
    assert after["metadata"]["generation"] == job["metadata"]["generation"] + 1
    changed = {**after, "spec": {**after["spec"], "suspend": False}, "status": status}
    told = kube.run(kube.client.replace(api_client.TRAINING_JOBS, kube.namespace, changed, subresource="status"))
    assert told["status"] == status
    assert told["spec"]["suspend"] is True
    assert told["metadata"]["generation"] == after["metadata"]["generation"]
    kube.remove("apart")


def test_the_server_says_who_asks(kube: Kube) -> None:
    answer = kube.run(kube.client.create(api_client.SELF_REVIEWS, None, {}))
    assert answer["status"]["userInfo"]["username"]


@pytest.mark.usefixtures("roles")
def test_the_server_says_who_may(kube: Kube) -> None:
    attributes = {
        "namespace": kube.namespace,
        "verb": "submit",
        "group": objects.API_GROUP,
        "resource": objects.CRD_PLURAL,
    }
    for groups, is_allowed in ((["system:masters"], True), ([], False)):
        spec = {"user": "nobody-knows-me", "groups": groups, "resourceAttributes": attributes}
        review = kube.run(kube.client.create(api_client.ACCESS_REVIEWS, None, {"spec": spec}))
        assert review["status"]["allowed"] is is_allowed
