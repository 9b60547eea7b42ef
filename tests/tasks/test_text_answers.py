from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from maxrl_fast.config.options import Reward
from maxrl_fast.job.build_parts import build_task
from maxrl_fast.records import Rollouts
from maxrl_fast.tasks.dataset_specs import BOX, TAGS
from maxrl_fast.tasks.text_codec import TextTask, prompts_of
from maxrl_fast.training.answers import check_answers
from tests.tables import refused
from tests.tasks.test_dataset import responses, written


class Merging(TextTask):
    """A token for every byte and for each of these merges."""

    def __init__(self, *merges):
        vocabulary = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *map("".join, merges)]
        model = models.BPE({word: i for i, word in enumerate(vocabulary)}, [*merges])
        self.tokenizer = Tokenizer(model)
        self.tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(False, use_regex=False)
        self.tokenizer.decoder = decoders.ByteLevel()

    def ids(self, *pieces):
        return [i for piece in pieces for i in self.tokenizer.encode(piece).ids]

    def encode_piece(self, text, place):
        return self.ids(text)

    def decode(self, tokens):
        return self.tokenizer.decode(tokens)


def references(codec, answer, *responses, form=BOX):
    prompts = prompts_of([[1]], [4], [{"answer": answer}])
    codec.form = form
    return codec.reference_answers(prompts, Rollouts.given([*responses]))


def test_the_reasoning_ends_with_the_first_marker_and_the_answer_is_as_the_tokenizer_writes_it():
    codec = Merging(("{", "\\"))
    first, second, third, fourth = references(
        codec,
        "\\frac12",
        codec.ids("so \\boxed{7} or \\boxed{8}"),
        codec.ids("\\boxed"),
        codec.ids("so 7"),
        codec.ids("é\\boxed{\\pi}"),
    )
    assert len(codec.ids("{\\")) == 1
    assert (first.length, first.lead) == (9, codec.ids("\\boxed"))
    assert first.answer == codec.ids("{\\frac12}")
    assert (second.length, second.answer) == (6, first.answer)
    assert (third.length, third.lead, third.answer) == (None, first.lead, first.answer)
    assert (fourth.length, fourth.answer) == (8, first.answer)  # é is two tokens
    assert codec.decode([*codec.ids("so 7"), *third.lead, *third.answer]) == "so 7\\boxed{\\frac12}"
    [tagged] = references(codec, "42", codec.ids("<answer> 7</answer>"), form=TAGS)
    assert (tagged.length, tagged.answer) == (7, codec.ids(">42</answer>"))


def test_a_token_across_the_marker_begins_the_answer_or_gives_another_one():
    codec = Merging(("d", "{"), ("d{", "\\"))
    box, wrong = codec.ids("so \\boxed{"), codec.ids("\\boxed{\\pi}")
    assert len(box) == 9
    begun, other, spelled, none = references(
        codec, "42", [*box, *codec.ids("7}")], wrong, codec.ids("\\boxed", "{42}"), []
    )
    assert (begun.length, begun.lead, begun.answer) == (9, codec.ids("\\boxed{"), codec.ids("42}"))
    # another answer; tokens that the tokenizer does not write; no response
    for reference in (other, spelled, none):
        assert (reference.length, reference.lead) == (None, codec.ids("\\boxe"))
        assert reference.answer == codec.ids("d{42}")
    [found] = references(codec, "\\pi", wrong)
    assert (found.length, found.answer) == (len(codec.ids("\\boxed{\\")), codec.ids("pi}"))


def test_a_prompt_without_an_answer_is_refused():
    with refused("every prompt must have a reference answer as text, got none for prompt 4"):
        references(Merging(), None, [1])


PROBLEMS = [{"problem": f"{a}+{b}=", "answer": a + b} for a in range(10) for b in range(6)]


def test_tasks_of_text_know_their_answers(policy, tmp_path):
    data = written(tmp_path / "sums.jsonl", PROBLEMS)
    task = build_task("math", {"data": (data,)}, 0, policy)
    prompts = task.prompts("train", 0, 2)
    right = [f"{line['answer']}" for line in prompts.columns]
    given = responses(task, ["it is \\boxed{1}.", "none", "\\boxed{", "\\boxed{2}"])
    found = task.reference_answers(prompts, given)
    assert [reference.length for reference in found] == [12, None, 6, 6]
    wanted = [f"{{{text}}}" for text in right for _ in range(2)]
    assert [task.decode(reference.answer) for reference in found] == wanted
    gym = build_task("gym:chain_sum", {}, 0, policy)
    prompts = gym.prompts("train", 0, 1)
    [reference] = gym.reference_answers(prompts, responses(gym, ["so <answer>3</answer>"]))
    assert reference.length == 10
    assert gym.decode(reference.answer) == f">{prompts.columns[0]['answer']}</answer>"


def test_tasks_that_do_not_know_their_answers_and_answers_with_control_tokens_are_refused(
    policy, tmp_path
):
    data = written(tmp_path / "sums.jsonl", [{"prompt": line["problem"]} for line in PROBLEMS])
    task = build_task("dataset", {"data": (data,)}, 0, policy, Reward(reward=("rewards.py:f",)))
    with refused("rlpr: the reference answer must be known, but only the reward function"):
        check_answers(task, "--reward-source rlpr")
    lines = [line | {"answer": "<|im_end|>"} for line in PROBLEMS]
    data = written(tmp_path / "forged.jsonl", lines)
    with refused("the reference answer to prompt 0: "):
        check_answers(build_task("math", {"data": (data,)}, 0, policy), "--reward-source rlpr")
