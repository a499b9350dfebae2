"""The committed notebooks are those of their scripts, and were executed to their end.

That they still run is for `make check-notebooks`, a stage of .ci/run: it takes minutes.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).parent.parent
_SPEC = importlib.util.spec_from_file_location("execute", ROOT / "notebooks" / "execute.py")
assert _SPEC is not None and _SPEC.loader is not None
execute = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(execute)
SCRIPTS = execute.scripts()


@pytest.fixture(params=SCRIPTS, ids=lambda script: script.stem)
def pair(request):
    script = request.param
    return script, nbformat.read(script.with_suffix(".ipynb"), as_version=4)


def test_there_are_the_four():
    assert [script.stem[0] for script in SCRIPTS] == ["1", "2", "3", "4"]
    assert {p.stem for p in (ROOT / "notebooks").glob("*.ipynb")} == {p.stem for p in SCRIPTS}


def test_a_notebook_has_the_cells_of_its_script(pair):
    script, notebook = pair
    nbformat.validate(notebook)
    assert execute.sources(notebook) == execute.sources(execute.unexecuted(script))
    assert notebook.metadata["jupytext"] == {"formats": "ipynb,py:percent"}


def test_all_of_it_was_executed_in_order_and_nothing_went_wrong(pair):
    _, notebook = pair
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell.outputs]
    assert {output.output_type for output in outputs} <= {"stream", "execute_result"}
    assert {output.get("name", "stdout") for output in outputs} == {"stdout"}, "no warnings"


def test_it_reads_where_there_is_no_html_and_runs_no_script(pair):
    """GitHub takes scripts out; a terminal has the text only."""
    _, notebook = pair
    shown = [o.data for c in notebook.cells for o in c.get("outputs", []) if "data" in o]
    assert shown, "something is shown, and not only printed"
    for data in shown:
        assert set(data) == {"text/plain", "text/html"}
        assert "<script" not in data["text/html"]
        assert "Plan(" not in data["text/plain"]


def test_it_names_no_path_of_the_machine_it_ran_on(pair):
    _, notebook = pair
    text = nbformat.writes(notebook)
    assert not re.findall(r"ipykernel_\d+|/tmp/\w+|/root/|/home/(?!someone)\w+|\b\d{7,}\.py", text)


def test_a_notebook_that_is_out_of_date_is_found(pair, tmp_path):
    script, notebook = pair
    assert execute.problems(script, notebook, 1.0) == []
    assert "took 999 s" in execute.problems(script, notebook, 999.0)[0]
    assert "is missing" in execute.problems(tmp_path / "5_new.py", notebook, 1.0)[0]
    changed = nbformat.from_dict(notebook)
    shown = next(c for c in changed.cells if c.get("outputs"))
    shown.outputs[0] = nbformat.v4.new_output("error", ename="E", evalue="", traceback=[])
    assert "outputs of another form" in execute.problems(script, changed, 1.0)[0]
    changed.cells[0].source += "!"
    assert "has other cells" in execute.problems(script, changed, 1.0)[0]
