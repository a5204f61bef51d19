import random

import pytest
import torch

from ringweave.errors import TrainingError
from ringweave.param_server import snapshots
from ringweave.param_server.barrier import RingBarrier
from ringweave.param_server.data_shards import DataShard
from ringweave.param_server.model import AccumulatingModel
from ringweave.param_server.snapshots import LiveRingState
from ringweave.param_server.versions import PushReceipt, RingGrants
from tests.param_server.serving.test_model import filled, newest, setup_of

ADAMW = {"lr": 0.1, "betas": [0.8, 0.9], "amsgrad": True}


def trained(name: str, options: dict, steps: int) -> AccumulatingModel:
    model = AccumulatingModel(setup_of(name, options), filled(0))
    for number in range(steps):
        model.apply_gradient(filled(number), 0.75, [options, options])
    return model


@pytest.mark.parametrize(("name", "options"), [("SGD", {"lr": 0.1, "momentum": 0.9}), ("AdamW", ADAMW)])
def test_goes_on_exactly_where_it_was(tmp_path, name, options):
    model = trained(name, options, 3)
    pushed = {1: PushReceipt(ring=1, sequence=3, version=3, staleness_versions=0, damping=1.0)}
    found = snapshots.take_snapshot(model, 3, pushed)
    model.apply_gradient(filled(3), 0.75, [options, options])  # beside the writing
    snapshots.save_snapshot(found, tmp_path / "deep" / "server.safetensors")
    back = snapshots.load_snapshot(tmp_path / "deep" / "server.safetensors")
    assert (back.version, back.pushed) == (3, pushed)
    later = snapshots.restore_model(back)
    assert all(map(torch.equal, newest(snapshots.restore_model(back)), newest(trained(name, options, 3))))
    later.apply_gradient(filled(3), 0.75, [options, options])
    assert all(map(torch.equal, newest(later), newest(model)))


def test_a_standby_gets_what_rings_are_about(tmp_path):
    live = LiveRingState(
        ring_grants=[RingGrants(grants=(2, 3), num_since=1), RingGrants(grants=(), num_since=0)],
        shards=[DataShard(ring=1, number=4, epoch=2, first=6, num_samples=3)],
        dispatched={1: 9, 2: 9},
        gone=[0],
        barrier=RingBarrier.of_rings(2),
    )
    model = trained("AdamW", ADAMW, 3)
    found = snapshots.snapshot_from_bytes(snapshots.snapshot_to_bytes(snapshots.take_snapshot(model, 3, {}, live)))
    assert (found.live_state, found.version) == (live, 3)
    assert all(map(torch.equal, newest(snapshots.restore_model(found)), newest(model)))
    with pytest.raises(TrainingError, match=r"snapshot of the parameter server: .*, expected one of a server that le"):
        snapshots.snapshot_from_bytes(b"\x00" * 40)


def test_a_damaged_file_is_refused(tmp_path):
    path = tmp_path / "server.safetensors"
    snapshots.save_snapshot(snapshots.take_snapshot(trained("SGD", {"lr": 0.1}, 1), 1, {}), path)
    whole = path.read_bytes()
    for num_bytes in (0, 7, 100, len(whole) - 1):
        path.write_bytes(whole[:num_bytes])
        with pytest.raises(TrainingError, match=r"snapshot of the parameter server: .*, expected a whole file"):
            snapshots.load_snapshot(path)


def test_a_disk_that_is_full_leaves_the_last_one(tmp_path, monkeypatch):
    path = tmp_path / "server.safetensors"
    snapshots.save_snapshot(snapshots.take_snapshot(trained("SGD", {"lr": 0.1}, 1), 1, {}), path)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        snapshots.save_snapshot(snapshots.take_snapshot(trained("SGD", {"lr": 0.1}, 2), 2, {}), path)
    assert snapshots.load_snapshot(path).version == 1


def test_what_the_library_says_of_a_disk_is_an_error_of_the_disk(tmp_path):
    """It cannot write where a folder is."""
    path = tmp_path / "server.safetensors"
    path.with_name(path.name + ".partial").mkdir()
    with pytest.raises(OSError, match=r"server\.safetensors\.partial"):
        snapshots.save_snapshot(snapshots.take_snapshot(trained("SGD", {"lr": 0.1}, 1), 1, {}), path)


def test_every_flipped_bit_is_found(tmp_path):
    path, rng = tmp_path / "server.safetensors", random.Random(6)
    snapshots.save_snapshot(snapshots.take_snapshot(trained("AdamW", {"lr": 0.1}, 1), 1, {}), path)
    whole = path.read_bytes()
    whole_books = whole.index(b"__metadata__")
    for place in [*range(whole_books), *rng.sample(range(len(whole)), 300), len(whole) - 1]:
        damaged = bytearray(whole)
        damaged[place] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        with pytest.raises(TrainingError, match=r"snapshot of the parameter server: "):
            snapshots.load_snapshot(path)
