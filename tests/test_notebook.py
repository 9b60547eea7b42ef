import json
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).parent.parent / "examples" / "notebook.ipynb"


def test_the_notebook_is_stored_without_outputs():
    cells = [
        cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"
    ]
    assert len(cells) >= 6
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in cells)


@pytest.mark.slow
def test_the_notebook_runs_and_shows_its_results(tmp_path):
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    resources = {"metadata": {"path": str(tmp_path)}}  # where it writes runs/
    NotebookClient(notebook, timeout=300, kernel_name="python3", resources=resources).execute()
    shown = [
        "".join(output.get("text") or json.dumps(output["data"]) for output in cell.outputs)
        for cell in notebook.cells
        if cell.cell_type == "code"
    ]
    assert "maxpo k=4, loss ppo, task maze 7x7" in shown[0]
    assert "image/png" in shown[2]
    metrics, *others = sorted(tmp_path.glob("runs/*/metrics.jsonl"))
    assert len(others) == 2
    lines = metrics.with_name("eval.jsonl").read_text().splitlines()
    first, last = (json.loads(lines[i])["pass_at_k"]["4"] for i in (0, -1))
    assert last > first + 0.03  # it learns what MaxPO with k = 4 is about
