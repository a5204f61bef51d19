"""Curves and run.json must survive kills and other writers."""

import json

from support import files


def test_a_curve_reads_back_to_the_same_bits(tmp_path):
    losses = [0.1 + 0.2, 1 / 3, 5.536027908325195]
    for train_step, loss in enumerate(losses, start=1):
        files.append(tmp_path / "curve", train_step=train_step, loss=loss)
    assert files.read_curve(tmp_path / "curve") == ([1, 2, 3], losses)


def test_a_resumed_curve_drops_later_steps_and_a_line_cut_short(tmp_path):
    curve = tmp_path / "curve"
    for train_step in (1, 2, 3):
        files.append(curve, train_step=train_step, loss=float(train_step))
    with curve.open("a") as lines:
        lines.write('{"train_step": 4, "lo')
    files.keep_until(curve, 2)
    assert files.read_curve(curve) == ([1, 2], [1.0, 2.0])


def test_a_curve_that_is_not_there_is_empty(tmp_path):
    files.keep_until(tmp_path / "curve", 2)
    assert files.read_curve(tmp_path / "curve") == ([], [])


def test_run_json_keeps_what_others_wrote(tmp_path):
    path = tmp_path / "out" / "run.json"
    files.merge_into_json(path, {"steps": 1})
    path.write_text(json.dumps({"versions": {"torch": "2"}, "steps": 1}))
    files.merge_into_json(path, {"steps": 2, "loss": 0.5})
    assert json.loads(path.read_text()) == {"versions": {"torch": "2"}, "steps": 2, "loss": 0.5}
    assert [entry.name for entry in path.parent.iterdir()] == ["run.json"]
