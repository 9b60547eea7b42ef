"""Kept rollouts: what is written is read again, compressed or not, after a kill at any moment, and from damaged files."""

import errno
import os
import re
import shutil
from pathlib import Path

import pandas as pd
import pytest
import zstandard

from maxrl_fast import train
from maxrl_fast.errors import InputError
from maxrl_fast.run import kept_rollouts
from maxrl_fast.run.kept_rollouts import RolloutLog, read_rollouts
from tests.run.test_resume import assert_same, run
from tests.test_train import without_timings

METRICS_PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    monkeypatch.setattr(kept_rollouts, "PART_BYTES", 300)


def records_of(step):
    return [{"step": step, "id": i, "response": "07 <|im_end|>" + "x" * step, "reward": None} for i in range(2)]


def write_steps(out, first, last, from_step=None):
    log = RolloutLog(out, first - 1 if from_step is None else from_step)
    for step in range(first, last + 1):
        log.write(records_of(step))
    log.sync()
    log.close()


def steps_of(first, last):
    return [record for step in range(first, last + 1) for record in records_of(step)]


def files(out):
    return {path.name: path.read_bytes() for path in out.iterdir()}


@pytest.fixture
def ten_steps(tmp_path):
    """Return a folder with several closed parts and an open one."""
    out = tmp_path / "out"
    out.mkdir()
    write_steps(out, 1, 10)
    names = sorted(files(out))
    assert len(names) >= 4
    assert names[-1] == "rollouts.jsonl"
    assert all(name == f"rollouts-{i:05d}.jsonl.zst" for i, name in enumerate(names[:-1], start=1))
    return out


def test_all_parts_are_read_in_the_order_of_the_steps(ten_steps):
    warnings = []
    assert list(read_rollouts(ten_steps, warnings.append)) == steps_of(1, 10)
    assert warnings == []


def test_pandas_reads_the_files_as_the_documentation_says(ten_steps, monkeypatch):
    blocks = [block for block in re.findall(r"```python\n(.*?)```", METRICS_PAGE.read_text(), re.S) if "rollouts" in block]
    assert len(blocks) == 2
    monkeypatch.chdir(ten_steps.parent)
    for block in blocks:
        names = {}
        exec(block.replace("runs/first", "out"), names)
        table = names["rollouts"]
        assert isinstance(table, pd.DataFrame)
        expected = steps_of(1, 10)
        assert table["step"].tolist() == [record["step"] for record in expected]
        assert table["response"].tolist() == [record["response"] for record in expected]


@pytest.mark.parametrize("last", range(11))
def test_a_resumed_run_writes_the_same_files(ten_steps, last):
    before = files(ten_steps)
    log = RolloutLog(ten_steps, last)
    log.close()
    assert list(read_rollouts(ten_steps)) == steps_of(1, last)
    write_steps(ten_steps, last + 1, 10)
    assert files(ten_steps) == before


def killed_at(monkeypatch, count, target):
    """Raise KeyboardInterrupt at the call with this index of everything that changes a name of a file."""
    calls = []

    def counted(change):
        def changed(*arguments, **options):
            calls.append(change.__name__)
            if len(calls) > count:
                raise KeyboardInterrupt
            return change(*arguments, **options)

        return changed

    for name in ("rename", "unlink"):
        monkeypatch.setattr(Path, name, counted(getattr(Path, name)))
    try:
        target()
    except KeyboardInterrupt:
        return True
    finally:
        monkeypatch.undo()
    return False


@pytest.mark.parametrize("last", [0, 1, 4, 9])
def test_a_kill_at_any_moment_of_cutting_loses_nothing(ten_steps, tmp_path, monkeypatch, last):
    before, count, was_killed = files(ten_steps), 0, True
    while was_killed:
        out = Path(shutil.copytree(ten_steps, tmp_path / str(count)))
        was_killed = killed_at(monkeypatch, count, lambda out=out: RolloutLog(out, last))
        monkeypatch.setattr(kept_rollouts, "PART_BYTES", 300)
        assert [record for record in read_rollouts(out) if record["step"] <= last][: 2 * last] == steps_of(1, last)
        write_steps(out, last + 1, 10)
        for partial in out.glob(".*.partial"):  # RunFiles removes them
            partial.unlink()
        assert files(out) == before
        count += 1
    assert count > 2


def test_a_kill_at_any_moment_of_closing_a_part_loses_nothing(ten_steps, tmp_path, monkeypatch):
    before, count, was_killed = files(ten_steps), 0, True
    while was_killed:
        out = tmp_path / str(count)
        out.mkdir()
        was_killed = killed_at(monkeypatch, count, lambda out=out: write_steps(out, 1, 10))
        monkeypatch.setattr(kept_rollouts, "PART_BYTES", 300)
        found = list(read_rollouts(out))
        assert found == steps_of(1, len(found) // 2)
        write_steps(out, len(found) // 2 + 1, 10)
        for partial in out.glob(".*.partial"):
            partial.unlink()
        assert files(out) == before
        count += 1
    assert count > 9


def test_a_line_that_a_kill_cut_off_is_skipped_and_removed_on_resume(ten_steps):
    before, path, warnings = files(ten_steps), ten_steps / "rollouts.jsonl", []
    with open(path, "ab") as file:
        file.write(b'{"step": 10, "id": 2')
    assert list(read_rollouts(ten_steps, warnings.append)) == steps_of(1, 10)
    assert warnings == ["rollouts.jsonl: skipped 1 line, damaged, incomplete or too long"]
    RolloutLog(ten_steps, 10)
    assert files(ten_steps) == before


def test_damaged_lines_are_skipped_and_counted(ten_steps, monkeypatch):
    monkeypatch.setattr(kept_rollouts, "LINE_BYTES", 100)
    hidden = b"x" * 100 + b'{"step": 1, "id": 7}'  # behind a long line's limit, and no line of its own
    damaged = [b"not JSON", b"[1, 2]", b"[" * 80, b"\xff\xfe", hidden, b"  "]
    (ten_steps / "rollouts.jsonl").write_bytes(b"\n".join([b'{"step": 11}', *damaged, b'{"step": 12}', b""]))
    warnings = []
    found = list(read_rollouts(ten_steps, warnings.append))
    assert found[-2:] == [{"step": 11}, {"step": 12}]
    assert warnings == ["rollouts.jsonl: skipped 5 lines, damaged, incomplete or too long"]


def test_damaged_parts_are_skipped_from_the_damage_on(ten_steps):
    first, second, *_ = sorted(ten_steps.glob("*.zst"))
    second.write_bytes(b"\x00" * 100)
    warnings = []
    rest = list(read_rollouts(ten_steps, warnings.append))
    lost = [record for record in steps_of(1, 10) if record not in rest]
    assert [record for record in steps_of(1, 10) if record not in lost] == rest
    assert [re.sub(r"\(.*\)", "()", text) for text in warnings] == [
        "rollouts-00002.jsonl.zst is damaged (); its other rollouts were skipped"
    ]
    with pytest.raises(InputError, match=r"rollouts-00002\.jsonl\.zst must be readable, and is damaged .*move it away"):
        RolloutLog(ten_steps, lost[0]["step"])
    first.write_bytes(first.read_bytes()[:-20])  # cut off
    assert list(read_rollouts(ten_steps, warnings.append))[-1] == records_of(10)[-1]
    assert re.match(r"rollouts-00001.jsonl.zst is damaged \(it is cut off after \d+ of \d+ bytes\)", warnings[1])


def test_what_unpacks_to_more_than_the_limit_is_not_read_to_its_end(tmp_path, monkeypatch):
    monkeypatch.setattr(kept_rollouts, "MOST_BYTES", 10**6)
    line = b'{"step": 1, "id": 1}\n'
    (tmp_path / "rollouts-00001.jsonl.zst").write_bytes(zstandard.ZstdCompressor().compress(line * 10**6))
    warnings = []
    assert len(list(read_rollouts(tmp_path, warnings.append))) == 10**6 // len(line)
    assert warnings == ["the kept rollouts have more than 1,000,000 bytes; those behind were skipped"]


def test_a_pipe_in_place_of_a_part_is_refused(tmp_path):
    os.mkfifo(tmp_path / "rollouts-00001.jsonl")
    with pytest.raises(InputError, match=r"rollouts-00001.jsonl must be a regular file, got a pipe"):
        list(read_rollouts(tmp_path))


def test_other_files_of_the_folder_are_no_parts(tmp_path):
    for name in ("rollouts-1.jsonl", "rollouts-00001.jsonl.gz", "rollouts-notes.jsonl", "rollouts-00001.json"):
        (tmp_path / name).write_text('{"step": 1}\n')
    assert list(read_rollouts(tmp_path)) == []


@pytest.mark.slow
def test_keeping_rollouts_changes_no_number_and_0_keeps_none(tmp_path):
    for name, number in (("some", "5"), ("none", "0")):
        assert run(tmp_path / name, "--objective", "maxrl", "--keep-rollouts", number) == 0
    some, none = tmp_path / "some", tmp_path / "none"
    assert without_timings(some / "metrics.jsonl") == without_timings(none / "metrics.jsonl")
    assert not list(none.glob("rollouts*"))
    found = list(read_rollouts(some))
    assert [record["step"] for record in found] == [step for step in range(1, 7) for _ in range(5)]
    # Four of one prompt, then one of another.
    assert all(len({record["id"] for record in found[i : i + 4]}) == 1 for i in range(0, 30, 5))
    assert all(found[i]["id"] != found[i + 4]["id"] for i in range(0, 30, 5))


@pytest.mark.slow
@pytest.mark.parametrize("where", ["RolloutLog.write", "_compress"])
def test_a_full_disk_ends_the_run_with_a_sentence_and_it_resumes(tmp_path, monkeypatch, capsys, where):
    monkeypatch.setattr(kept_rollouts, "PART_BYTES", 5_000)
    assert run(tmp_path / "whole", "--objective", "maxrl") == 0
    writes, function = [], RolloutLog.write if where == "RolloutLog.write" else kept_rollouts._compress

    def full(*arguments):
        writes.append(1)
        if len(writes) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        return function(*arguments)

    monkeypatch.setattr(f"maxrl_fast.run.kept_rollouts.{where}", full)
    assert run(tmp_path / "run", "--objective", "maxrl") == 1
    assert "rollouts.jsonl: [Errno 28] No space left on device; the last good checkpoint is" in capsys.readouterr().err
    assert train.main(["--resume", str(tmp_path / "run")]) == 0
    assert_same(tmp_path / "whole", tmp_path / "run")
    assert len(list((tmp_path / "run").glob("rollouts-*.zst"))) == len(list((tmp_path / "whole").glob("rollouts-*"))) > 1


@pytest.mark.slow
def test_a_run_that_is_resumed_from_its_beginning_starts_its_rollouts_anew(tmp_path):
    out = tmp_path / "run"
    assert run(out, "--objective", "maxrl") == 0
    before = list(read_rollouts(out))
    shutil.rmtree(out / "checkpoints")
    for log in ("metrics", "eval"):
        os.truncate(out / f"{log}.jsonl", 0)
    assert train.main(["--resume", str(out)]) == 0
    assert list(read_rollouts(out)) == before
