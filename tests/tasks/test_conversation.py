import datetime
import decimal
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from maxrl_fast.model.tokenizer import saved_files
from maxrl_fast.records import Rollouts
from maxrl_fast.rollout import Decoding, cut
from maxrl_fast.tasks import conversation
from maxrl_fast.tasks.conversation import TextOptions
from maxrl_fast.tasks.sources import read_lines, read_prompt
from maxrl_fast.tasks.text_codec import TextTask
from tests.tables import refused
from tests.tasks.test_dataset import CHAT, save_byte_level_policy, texts_of

ASKED = [{"role": "user", "content": "2+2?"}]
MARKS = ("<bos>", "<eos>", "<|start|>", "<|end|>", "<|user|>", "<think>", "</think>")
TURN = "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
BEGIN = "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
OPEN = BEGIN.replace("\n{%", "\n<think>\n{%")
DROPS = TURN.replace("m.content }}", "m.content.split('</think>')[-1].strip() }}")
LAST = "{% if m.role == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}{{ m.content"
REASONS = "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
FILLED = "{% if m.role == 'assistant' %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
THOUGHT = "<think>\nadd\n</think>\n\n4"
LIST = TURN.replace("{{ m.content", LAST)


def with_thoughts(written):
    return TURN.replace("{{ m.content", written + "{{ m.content")


# name: template, response, what is learned
TEMPLATES = {
    "the template ends a turn, not eos": ("{{ bos_token }}" + TURN + BEGIN, "4", "4<|end|>"),
    "thoughts are opened by the prompt": (TURN + OPEN, THOUGHT, THOUGHT[8:] + "<|end|>"),
    "and dropped from earlier turns": (DROPS + OPEN, THOUGHT, THOUGHT[8:] + "<|end|>"),
    "a response that closes them": (DROPS + OPEN, THOUGHT[8:], THOUGHT[8:] + "<|end|>"),
    "a last turn has no thoughts": (LIST + BEGIN, "4", "<think>\n\n</think>\n\n4<|end|>"),
    "the content is trimmed": (TURN.replace("t }}", "t | trim }}") + BEGIN, " 4\n", "4<|end|>"),
    "a line divides the end of a turn from that of a text": (
        TURN + BEGIN + "{% if not add_generation_prompt %}{{ eos_token }}{% endif %}",
        "4",
        "4<|end|>",
    ),
    "the next role ends a turn": (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}",
        "4",
        "4<|user|>",
    ),
    "thoughts in the content fill a block that is always written": (
        with_thoughts(FILLED) + OPEN,
        THOUGHT,
        THOUGHT[8:] + "<|end|>",
    ),
    "and those that only close it": (
        with_thoughts(FILLED) + OPEN,
        THOUGHT[8:],
        THOUGHT[8:] + "<|end|>",
    ),
    "reasoning is a key": (
        with_thoughts(REASONS) + BEGIN,
        {"role": "assistant", "content": "4", "reasoning_content": "add"},
        THOUGHT + "<|end|>",
    ),
}


def codec_of(folder, chat=CHAT, tools=(), **options):
    special = {"bos_token": "<bos>", "eos_token": "<eos>"}
    policy = save_byte_level_policy(folder, special=special, added=MARKS[2:], chat=chat)
    return TextTask(policy, TextOptions(**options), tools=tools)


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_demonstration_is_what_the_template_writes_after_the_prompt(tmp_path, name):
    chat, response, learned = TEMPLATES[name]
    codec = codec_of(tmp_path, chat)
    prompt, shown = codec.encode_demonstration(ASKED, response, "line 1")
    assert prompt == codec.encode_prompt(ASKED, "line 1")
    assert codec.decode(shown, with_special=True) == learned
    assert shown[-1] == codec.conversation.end
    assert shown[-1] in codec.stop_ids


def test_a_response_that_cannot_follow_the_prompt_is_refused(tmp_path):
    with refused(r"line 3: .* ends with .*<think>\\n', and a response must continue it"):
        codec_of(tmp_path, DROPS + OPEN).encode_demonstration(ASKED, "4", "line 3")
    given = {**said("4"), "reasoning_content": "a"}
    with refused("does not write reasoning_content"):
        codec_of(tmp_path).encode_demonstration(ASKED, given, "")


def said(content):
    return {"role": "assistant", "content": content}


def test_prompts_have_one_beginning_and_a_last_answer_goes_on(tmp_path):
    codec = codec_of(tmp_path, "{{ bos_token }}" + TURN + BEGIN)
    ids = [(mark, codec.tokenizer.convert_tokens_to_ids(mark)) for mark in MARKS[:2]]
    codec.tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A <eos>", special_tokens=ids
    )
    made = conversation.Conversation(codec.tokenizer, {ids[1][1]})
    options = {"tokenize": False, "add_generation_prompt": True}
    rendered = codec.tokenizer.apply_chat_template(ASKED, **options)
    assert made.prompt(rendered) == made.prompt(ASKED)
    assert made.prompt("hi")[0] == ids[0][1]
    assert made.text(made.prompt("hi")[1:], raw=True) == "hi"
    begun = made.prompt([*ASKED, said("It is ")])
    assert made.text(begun, raw=True).endswith("<|start|>assistant\nIt is ")
    prompt, learned = made.demonstration([*ASKED, said("It is ")], "4")
    assert (prompt, made.text(learned, raw=True)) == (begun, "4<|end|>")
    assert made.text(made.encode("[1 , 2] is n't .")) == "[1 , 2] is n't ."


SWITCH = "{% if add_generation_prompt and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
CLOSED = BEGIN + SWITCH
SAYS = with_thoughts("=> ") + BEGIN
PREFILLS = [  # template, contents of the last message, whether they are continued
    (TURN.replace("t }}", "t | trim }}") + BEGIN, ("", "It is ", "a:\n", "<think>\n"), True),
    (LIST + BEGIN, ("<think>\nadd", "<think>\n\n</think>\n\n4"), True),
    (LIST + CLOSED, ("", "It "), True),
    (SAYS, ("", "=> 4"), True),
    (SAYS, ("4",), False),
    (LIST + CLOSED, ("<think>\n", "a</think>"), False),
    (DROPS + OPEN, ("It ", "add</think>"), True),
    (DROPS + OPEN, ("<think>\n",), False),
]


@pytest.mark.parametrize(("chat", "contents", "is_continued"), PREFILLS)
def test_a_last_answer_is_continued_character_by_character(tmp_path, chat, contents, is_continued):
    made = codec_of(tmp_path, chat).conversation
    begin = made.tokenizer.apply_chat_template(ASKED, add_generation_prompt=True, tokenize=False)
    for content in contents:
        if not is_continued:
            with refused("other thoughts than those|last message of the assistant must continue"):
                made.prompt([*ASKED, said(content)])
            continue
        assert made.text(made.prompt([*ASKED, said(content)]), raw=True) == begin + content
        answer = "x</think>4" if content.endswith("<think>\n") else "4"
        prompt, learned = made.demonstration([*ASKED, said(content)], answer)
        if content:
            text = made.text([*prompt, *learned], raw=True)
            assert text == begin + content + answer + "<|end|>"


@pytest.mark.parametrize("turn", [LIST, with_thoughts(REASONS)])
def test_no_thoughts_are_learned_after_a_closed_block(tmp_path, turn):
    made = codec_of(tmp_path, turn + CLOSED).conversation
    for response in (THOUGHT, THOUGHT[8:], TEMPLATES["reasoning is a key"][1]):
        with refused("other thoughts than those given|a response must continue it"):
            made.demonstration(ASKED, response)


@pytest.mark.parametrize("scheme", ["always", "first", "never"])
def test_a_response_continues_a_prompt_that_is_text(scheme):
    names = {x: i for i, x in enumerate(["<unk>", "</s>", *"\u2581abc=?.12", "12", "ab"])}
    made = Tokenizer(models.BPE(names, [("1", "2"), ("a", "b")], unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    made.decoder = decoders.Metaspace(prepend_scheme=scheme)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>", unk_token="<unk>")
    chat = conversation.Conversation(tokenizer, [1])
    for prompt in ("a=", "a", "1", "c? "):
        for response in ("12", "b", " a."):
            before, learned = chat.demonstration(prompt, response)
            assert chat.text([*before, *learned[:-1]]) == prompt + response


SHORT = {"chat_template_kwargs": {"short": True}}


def test_arguments_that_a_template_does_not_read_are_refused(tmp_path):
    chat, options = "{% generation %}{% endgeneration %}" + CHAT, SHORT
    codec_of(tmp_path, chat + "{% if short is defined %}{% endif %}", **options)
    for part in ("", "{# short #}", "{{ 'short' }}", "{{ messages.short }}", "{% set short = 1 %}"):
        with refused("does not read 'short' of"):
            codec_of(tmp_path, chat + part, **options)


def test_arguments_a_file_and_a_day_are_the_templates(tmp_path):
    clock = "{% if short %}S{% endif %}{{ strftime_now('%d %b %H:%M') }}"
    (tmp_path / "chat.jinja").write_text(clock + CHAT)
    options = {"chat_template": tmp_path / "chat.jinja", **SHORT}
    codec = codec_of(tmp_path, None, template_date="2024-07-26", **options)
    assert codec.decode(codec.conversation.prompt(ASKED)).startswith("S26 Jul 00:00<|im_start|>")
    assert codec.conversation.clock == "2024-07-26"
    files = saved_files(codec.tokenizer, codec.model, codec._template)
    assert files["chat_template.jinja"].decode() == clock + CHAT
    (tmp_path / "chat.jinja").write_text("{{ strftime_now(x) }}")
    with refused("/chat.jinja must give strftime_now its format as text"):
        codec_of(tmp_path, None, **options)
    with refused("kwargs must not have add_generation_prompt, which the run sets"):
        codec_of(tmp_path, chat_template_kwargs={"add_generation_prompt": False})


def test_a_template_that_loops_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(conversation, "SECONDS", 0.2)
    loop = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    codec = codec_of(tmp_path, "{% if messages[0].content == '2+2?' %}" + loop + "{% endif %}")
    with refused("line 1: the chat template in .* it takes longer than 0.2 s"):
        codec.encode_prompt(ASKED, "line 1")


def test_stop_tokens_are_those_of_all_files_and_texts_end_a_response(tmp_path):
    codec = codec_of(tmp_path)
    config = json.loads((codec.model / "config.json").read_text())
    (codec.model / "config.json").write_text(json.dumps({**config, "eos_token_id": [3, 4]}))
    (codec.model / "generation_config.json").write_text('{"eos_token_id": 5}')
    codec = TextTask(codec.model, TextOptions(stop=("</a>", "<think>")))
    ids = codec.tokenizer.convert_tokens_to_ids
    assert {*codec.stop_ids} == {3, 4, 5, ids("<eos>"), ids("<think>")}
    texts = ["x</a>yz", "none", "</a></a>"]
    rollouts = Rollouts.given([codec.conversation.encode(text) for text in texts])
    rollouts.truncated[:] = True
    rollouts.logprobs[:] = torch.arange(len(rollouts.tokens))
    ended = cut(rollouts, Decoding(max_new_tokens=20).rules(codec))
    assert texts_of(codec, ended) == ["x</a>", "none", "</a>"]
    assert ended.truncated.tolist() == [False, True, False]
    assert ended.logprobs.tolist() == [0, 1, 2, 3, 4, 7, 8, 9, 10, 11, 12, 13, 14]
    assert TextTask(codec.model, TextOptions(stop=("x", "<think>"))).stop_texts == ["x"]
    with refused("--stop must be single tokens with --environment, got '</a>'"):
        TextTask(codec.model, TextOptions(stop=("</a>",)), tools=[{}])


CALL = "{% for c in m.tool_calls or [] %}"
FORMS = {
    "keys": CALL + "<call>{{ c.function.name }}{% for k, v in c.function.arguments.items() %}\n"
    "<key>{{ k }}</key>\n<value>{{ v if v is string else v | tojson }}</value>{% endfor %}"
    "\n</call>",
    "name": CALL + "to={{ c.function.name }}<|sep|>{{ c.function.arguments | tojson }}",
    "text": CALL
    + 'call {"tool": "{{ c.function.name }}", "input": {{ "" + c.function.arguments }}}.',
    "quotes": CALL + "<call>{{ c.function.name + '{' }}"
    "{% for k, v in c.function.arguments.items() %}{{ k }}:{% if v is string %}<q>{{ v }}<q>"
    "{% else %}{{ v | tojson }}{% endif %}{% if not loop.last %},{% endif %}{% endfor %}}</call>",
}
PROPERTIES = {"x": {"type": "string"}, "n": {"type": "integer"}}
FUNCTION = {"name": "find", "description": "", "parameters": {"properties": PROPERTIES}}
GIVEN = {"x": '  a "b": {c}, \n', "n": 3}


def test_a_template_without_calls_is_refused(tmp_path):
    with refused("must write calls of tools in a form that can be read, for --environment, got"):
        codec_of(tmp_path, tools=[{"type": "function", "function": FUNCTION}])


@pytest.mark.parametrize("form", FORMS)
def test_calls_are_read_as_the_template_writes_them_and_replied_to(tmp_path, form):
    chat = TURN.replace("m.content }}", "m.content }}" + FORMS[form] + "{% endfor %}") + BEGIN
    tools = [{"type": "function", "function": FUNCTION}]
    made = codec_of(tmp_path, chat, tools=tools).conversation
    call = {"type": "function", "function": {"name": "find", "arguments": GIVEN}}
    turn = {**said("I look. "), "tool_calls": [call]}
    before = made._render(ASKED, begins=True)
    sampled = made.encode(made._render([*ASKED, turn], begins=False)[len(before) :].strip())
    [read] = made.calls(sampled)
    assert (read.name, read.arguments, read.error) == ("find", GIVEN, "")
    whole = [*ASKED, turn, {"role": "tool", "content": "a<|end|>"}]
    wanted = made._render(whole, begins=True)
    reply = made.reply([read], ["a<|end|>"])
    assert made.text([*made.prompt(ASKED), *sampled, *reply], raw=True) == wanted
    assert reply.count(sampled[-1]) == 1  # what the environment writes is text
    [broken] = made.calls(sampled[: -len(made.encode("}</call>")) - 2])
    assert "cannot be read" in broken.error


WILD = [
    {"role": "user", "content": "q", "name": None, "tool_calls": None, "tool_call_id": None},
    {"role": "user", "content": [{"type": "text", "text": "q", "image": None}], "tool_calls": []},
]


@pytest.mark.parametrize("message", WILD)
def test_messages_as_they_are_in_the_wild(tmp_path, message):
    assert read_prompt([message], "it") == [{"role": "user", "content": "q"}]
    codec = codec_of(tmp_path)
    prompt = codec.conversation.prompt([{"role": "developer", "content": "q"}])
    assert codec.decode(prompt).startswith("<|im_start|>system\nq")


def test_columns_that_nobody_uses_never_refuse_a_file(tmp_path):
    day, odd = datetime.date(2024, 7, 26), datetime.datetime(2024, 7, 26, 1)
    columns = {
        "prompt": ["1"],
        "day": [day],
        "at": pa.array([odd], pa.timestamp("ns")),
        "price": [decimal.Decimal("0.10")],
        "raw": [b"\xff"],
        "score": [float("nan")],
    }
    pq.write_table(pa.table(columns), tmp_path / "d.parquet")
    [(_, line)] = read_lines(tmp_path / "d.parquet", "prompt")
    assert json.loads(json.dumps(line, allow_nan=False)) == line
    assert (line["day"], line["price"], line["score"]) == ("2024-07-26", "0.10", None)
