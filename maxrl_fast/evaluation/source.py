"""What CHECKPOINT names."""

from dataclasses import dataclass
from pathlib import Path

from maxrl_fast.errors import InputError, warn
from maxrl_fast.model.checkpoint import check_model, directory_of, find_model
from maxrl_fast.runtime.files import read_json
from maxrl_fast.runtime.run_folder import RunFolder


@dataclass(frozen=True)
class Source:
    checkpoint: Path  # a Hugging Face directory, absolute, links followed
    name: str  # for tables and file names
    run: Path | None = None  # the folder of the run that it lies in

    def describe(self) -> str:
        if self.run is None:
            return str(self.checkpoint)
        record = read_json(self.checkpoint / "progress.json")
        phase, step = record["progress"]["phase"], record["progress"]["step"]
        total = record["options"]["steps" if phase == "training" else "sft_steps"]
        kind = "step" if phase == "training" else "warm start step"
        return f"{self.checkpoint}, the policy after {kind} {step} of {total}"


def find_source(name: str) -> Source:
    """Return the checkpoint of a path or a name of the hub, which is downloaded."""
    wanted = "CHECKPOINT must be a Hugging Face checkpoint directory or the folder of a run"
    path = Path(name)
    if check_model(name, wanted) is not None:
        pinned = find_model(name, warn)
        short = pinned.rpartition("@")[0].rpartition("/")[2]
        return Source(directory_of(pinned, with_weights=True), short)
    if not (path / "config.json").exists():
        raise InputError(f"{wanted}, got {path}, which has no config.json")
    if RunFolder(path).is_run:
        newest = RunFolder(path).newest
        if newest is None:
            raise InputError(
                f"{path} is the folder of a run without a checkpoint: wait for its first"
            )
        path = newest
    path = path.resolve()
    run = next((folder for folder in list(path.parents)[:2] if RunFolder(folder).is_run), None)
    return Source(path, path.name if run is None else f"{run.name}-{path.name}", run)
