"""The notebook: its cells run in order, in a kernel of its own, and print what the text promises."""

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

NOTEBOOK = Path(__file__).parents[2] / "examples" / "06_plan_machines.ipynb"
MISSING = [name for name in ("nbclient", "ipykernel") if importlib.util.find_spec(name) is None]


@pytest.mark.slow
@pytest.mark.skipif(bool(MISSING), reason=f"{', '.join(MISSING)} of the extra dev is not installed")
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
def test_the_notebook_runs_and_says_what_is_predicted_and_what_is_simulated() -> None:
    import nbclient
    import nbformat

    notebook: Any = nbformat.read(NOTEBOOK, as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells), "outputs are not committed"
    nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(NOTEBOOK.parent)}}).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    text = "".join(output.get("text", "") for output in outputs)
    assert "laptop->desk" in text
    assert "best: balanced" in text
    (alone, late) = (float(each) for each in re.findall(r"simulated[^:]*: ([\d.]+) s", text))
    (bound,) = (float(each) for each in re.findall(r"bound of an allreduce: ([\d.]+) s", text))
    assert bound <= alone < late
    (best, even) = (float(each) for each in re.findall(r": ([\d.]+) s(?: a step)? \(predicted\)", text))
    assert best < even
    assert "predicted step: sync" in text
