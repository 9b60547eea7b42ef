"""Numbers of the GPU path that were computed or guessed, except where a comment says that they
were measured."""

# of logits at a time in losses from hidden states; larger matrix multiplications are no faster
CHUNK_BYTES = {"cpu": 1 << 25, "cuda": 5 << 28}
# of a GPU's memory, if that is more: fewer chunks are fewer passes over the weight's float32
# gradient
CHUNK_SHARE = 1 / 32

# decoding steps between two reads of which samples have ended
BURST = 8
# of prompts computed together; more are no faster, and their tensors are not counted in the limit
PREFILL_TOKENS = 32768


def chunk_bytes(device_type: str, memory: int) -> int:
    """Return the bytes of a chunk of logits on a device with this much memory."""
    least = CHUNK_BYTES.get(device_type, CHUNK_BYTES["cpu"])
    return max(least, int(memory * CHUNK_SHARE)) if device_type == "cuda" else least
