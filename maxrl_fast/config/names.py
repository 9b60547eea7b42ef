"""What a run and the readers of its files agree on. The report imports this in place of the
options, which import PyTorch; `tests/report/test_report.py` compares the names with theirs.
"""

# of one start of a run, which do not belong to its configuration
OF_ONE_START = ("resume", "out", "allow_changes", "config", "dry_run")
# of the task: where prompts come from
OF_TASK = (
    *("task", "maze_size", "data", "hub", "test_data", "test_hub"),
    *("allow_overlap", "where", "prompt_key", "answer_key", "prompt_suffix", "system_prompt"),
    *("plain_prompts", "max_prompt_tokens", "allow_special_tokens", "chat_template"),
    *("chat_template_kwargs", "template_date", "stop", "environment", "max_turns"),
)
# at which weight.json has W_N(p): 60 for each power of ten
PASS_RATES = [10.0 ** (i / 60 - 3) for i in range(181)]
