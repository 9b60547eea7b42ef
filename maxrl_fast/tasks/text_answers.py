"""Reference answers of tasks whose responses are text."""

from itertools import takewhile

from maxrl_fast.errors import InputError
from maxrl_fast.records import Prompts, Rollouts, unpack
from maxrl_fast.tasks import ReferenceAnswer
from maxrl_fast.tasks.dataset_specs import AnswerForm
from maxrl_fast.tasks.text_codec import TextTask, shortest


def text_answers(
    text: TextTask, form: AnswerForm, prompts: Prompts, rollouts: Rollouts
) -> list[ReferenceAnswer]:
    """Return the reference answer, the column "answer" of each prompt, after the first marker of
    each response: where a token reaches beyond the marker, its text must begin the answer. The
    answer's tokens are the tokenizer's for marker and answer together. A response without the
    marker, or that continues otherwise within a token, has the marker as its lead."""
    num_rollouts, ids = len(rollouts) // len(prompts), prompts.ids.tolist()
    wholes, ids_of_wholes = list[str](), list[list[int]]()
    for i, line in zip(ids, prompts.columns or ({},) * len(ids), strict=True):
        if not isinstance(answer := line.get("answer"), str):
            raise InputError(
                f"every prompt must have a reference answer as text, got none for prompt {i}"
            )
        wholes.append(f"{form.marker}{form.opening}{answer}{form.closing}")
        ids_of_wholes.append(text.encode_piece(wholes[-1], f"the reference answer to prompt {i}"))
    responses = unpack(rollouts.tokens, rollouts.lengths)
    ends = [_marker_end(text, form.marker, tokens) for tokens in responses]
    # of answers; only those that have been checked above
    texts = {x for s, (_, x) in enumerate(ends) if wholes[s // num_rollouts].startswith(x)}
    starts = {x: text.encode_piece(x, "an answer") for x in {form.marker, *texts}}
    found = []
    for s, (length, start) in enumerate(ends):
        ids, lead = ids_of_wholes[s // num_rollouts], starts.get(start)
        if length is None or lead is None or ids[: len(lead)] != lead or len(ids) == len(lead):
            # the tokens with which the marker and the whole begin, but not all of the whole
            both = zip(starts[form.marker], ids[:-1], strict=False)
            length, lead = None, [x for x, _ in takewhile(lambda pair: pair[0] == pair[1], both)]
        found.append(ReferenceAnswer(length, lead, ids[len(lead) :]))
    return found


def _marker_end(text: TextTask, marker: str, tokens: list[int]) -> tuple[int | None, str]:
    """Return how many tokens have the marker in their text, and their text from the marker on."""
    length = shortest(tokens, lambda beginning: marker in text.decode(beginning))
    after = "" if length is None else text.decode(tokens[:length]).partition(marker)[2]
    return length, marker + after
