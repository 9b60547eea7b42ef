"""A new policy of 0.1 million parameters, for loops that learn in seconds on a CPU. It needs
transformers (`make setup-hf`).
"""

import string
import tempfile
from pathlib import Path
from typing import Any

from maxrl_fast import Session
from maxrl_fast.model.checkpoint import new_files, write_policy
from maxrl_fast.model.policy import Model, new_policy
from maxrl_fast.tasks import word_tokenizer_files


def tiny_session(**options: Any) -> Session:
    """Return a session on a policy whose words are "after", the letters a to z and the digits; it
    does not see other text.
    """
    words = ["<pad>", "<bos>", "<eos>", "<unk>", "after", *string.ascii_lowercase, *string.digits]
    sizes = Model(hidden_size=64, intermediate_size=128, layers=2, heads=4)
    policy = new_policy(sizes, len(words), max_position_embeddings=512, seed=0)
    files = word_tokenizer_files(words, len(words)) | new_files(policy.config, (2,))
    with tempfile.TemporaryDirectory() as folder:
        write_policy(Path(folder), "float32", policy.weights(), files)
        return Session(folder, **{"lr": 3e-3, "clip_grad": 1.0, **options})
