"""Runs of one configuration with different seeds, shown as mean and standard error."""

import json
from collections import Counter
from typing import Any

from maxrl_fast.config.names import OF_ONE_START
from maxrl_fast.report.reading import Folder

_NAMED_OPTIONS = 3


def groups_of(folders: list[Folder], named: list[str]) -> list[dict[str, Any]]:
    """Return the groups of at least two runs whose options differ in their seeds alone: their
    places and a name, from the first options in `named`. The same seed twice is a repetition, which
    does not count."""
    members: dict[str, list[int]] = {}
    seeds: Counter[tuple[str, str]] = Counter()
    for i, folder in enumerate(folders):
        if folder.kind != "run" or not folder.options:
            continue
        own = {
            key: value
            for key, value in folder.options.items()
            if key not in (*OF_ONE_START, "seed")
        }
        configuration = json.dumps(own, sort_keys=True)
        seed = json.dumps(folder.options.get("seed"))
        seeds[configuration, seed] += 1
        if seeds[configuration, seed] == 1:
            members.setdefault(configuration, []).append(i)
    found = [places for places in members.values() if len(places) > 1]
    options = [folders[places[0]].options for places in found]
    differing = [
        key
        for key in named
        if key != "seed" and len({json.dumps(own.get(key)) for own in options}) > 1
    ]
    for number in range(1, _NAMED_OPTIONS + 1):  # as few options as tell the groups apart
        names = [_name(own, differing[:number] or ["objective"]) for own in options]
        if len(set(names)) == len(names):
            break
    return [
        {
            "runs": places,
            "name": f"{name if names.count(name) == 1 else folders[places[0]].name}, {len(places)} "
            "seeds",
        }
        for name, places in zip(names, found, strict=True)
    ]


def _name(options: dict[str, Any], keys: list[str]) -> str:
    """Return the values of these options as a name, for example "maxrl, k 4"."""
    known = [(key, options[key]) for key in keys if options.get(key) is not None]
    parts = (str(x) if key == "objective" else f"{key} {x}" for key, x in known)
    return ", ".join(part[:40] for part in parts) or "one configuration"
