"""Every decoder family of transformers, in tiny: exact, or refused. `python -m
tests.model.test_families` prints the table of docs/models.md."""

import os
import re
import warnings
from pathlib import Path

import pytest

from maxrl_fast.errors import InputError
from maxrl_fast.model.huggingface_checkpoint import check_supported, policy_of, sizes_of
from maxrl_fast.training.logprob_parity import check_exact
from tests.families import EXPERTS, FAMILIES, OTHERS, WINDOW, tiny_config, tiny_model

DOCUMENT = Path(__file__).parents[2] / "docs" / "models.md"
LONGEST = 64  # tokens
NOT_TRIED = ("gemma4_assistant",)  # its configuration has defaults that contradict each other


def verdict(family: str) -> str:
    """Return "exact", or why a policy of this family is refused."""
    from transformers import AutoConfig

    if family in NOT_TRIED:
        return "not tried: a run decides"
    try:
        if family not in OTHERS:  # the kinds of layers that it has by default
            check_supported(AutoConfig.for_model(family), LONGEST)
        config = tiny_config(family, **own_sizes(family))
        check_supported(config, LONGEST)
        check_exact(policy_of(tiny_model(config), sizes_of(config, config.to_dict())))
    except InputError as error:
        return "refused: " + shortened(str(error), family)
    except ValueError as error:  # of sizes_of, as read_huggingface reports it
        return f"refused: {error}"
    return "exact"


def own_sizes(family: str) -> dict[str, object]:
    """Return small windows and few experts for a family that has them by default."""
    from transformers import AutoConfig

    if family in FAMILIES or family in OTHERS:
        return {}
    default = AutoConfig.for_model(family)
    return {
        name: value
        for name, value in (EXPERTS | WINDOW).items()
        if getattr(default, name, None) is not None
    }


def shortened(message: str, family: str) -> str:
    """Return the reason in an error message, without the names of classes and numbers that differ
    between machines.
    """
    message = re.sub(
        rf"^{re.escape(family)} of transformers (is not supported|cannot be trained here): ",
        "",
        message,
    )
    message = re.sub(
        r" differ by up to \S+ nats from.*", " differ from those of its own forward pass", message
    )
    message = re.sub(r"^with the prompt computed once for its responses, ", "", message)
    message = re.sub(
        rf"^{re.escape(family)} of transformers (cannot compute a packed stream): .*",
        r"it \1",
        message,
        flags=re.DOTALL,
    )
    message = re.sub(
        r"^\w+ asks for (.*), which shared-prompt attention does not do$",
        r"its attention asks for \1",
        message,
    )
    return re.sub(r"^\w+ (does not say what its decoder layers are)$", r"it \1", message)


def table() -> str:
    """Return the table of docs/models.md."""
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    families: dict[str, list[str]] = {}
    for family in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        families.setdefault(verdict(family), []).append(f"`{family}`")
    lines = [f"| transformers {transformers.__version__} | `model_type` |", "|---|---|"]
    lines += [
        f"| {key} | {', '.join(families[key])} |"
        for key in sorted(families, key=lambda key: (key != "exact", key))
    ]
    return "\n".join(lines)


@pytest.mark.slow
def test_every_decoder_of_transformers_is_exact_or_refused():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = table()
    exact = found.splitlines()[2]
    assert exact.startswith("| exact |")
    for family in FAMILIES:
        assert f"`{family}`" in exact
    assert found in DOCUMENT.read_text(), (
        "python -m tests.model.test_families prints the table for docs/models.md"
    )


if __name__ == "__main__":
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    warnings.simplefilter("ignore")
    print(table())
