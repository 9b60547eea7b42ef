import json
import shutil

from maxrl_fast.runtime.files import RunFolder
from tests.runs import copied, read
from tests.tables import refused


def test_the_folder_of_a_run_says_what_it_holds(maze_run, tmp_path):
    out = copied(maze_run, tmp_path)
    folder = RunFolder(out)
    assert (folder.is_run, RunFolder(out / "latest").is_run) == (True, False)
    assert (folder.options["objective"], folder.options["steps"]) == ("maxpo", 6)
    assert not {"versions", "command"} & folder.options.keys()
    names = [path.name for path in folder.checkpoints]
    assert names == ["step-000000", "step-000002", "step-000004", "step-000006"]
    assert folder.newest == folder.checkpoints[-1]
    assert folder.is_finished
    assert folder.log("metrics") == read(out / "metrics.jsonl")
    with (out / "eval.jsonl").open("a") as file:
        file.write('{"step": 7')
    assert folder.log("eval")[-1]["step"] == 6
    for name in ("warm-start-000140", "step-1000000", "step-x", "damaged-step-000008"):
        (out / "checkpoints" / name).mkdir()
    assert [path.name for path in folder.checkpoints][::5] == ["warm-start-000140", "step-1000000"]
    shutil.rmtree(out / "checkpoints")
    assert (folder.newest, folder.is_finished, folder.log("none")) == (None, False, [])


def test_what_a_session_has_saved_and_what_is_damaged(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", "objective": 1}))
    (tmp_path / "progress.json").write_text(json.dumps({"options": {"lr": 0.1, "k": None}}))
    assert RunFolder(tmp_path).options == {"lr": 0.1}
    (tmp_path / "progress.json").write_text('{"options": 3}')
    with refused("progress.json must hold the options of a run, got 3"):
        _ = RunFolder(tmp_path).options
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step":\n')
    with refused("line 2 of .* must be JSON"):
        RunFolder(tmp_path).log("metrics")
