from maxrl_fast.runtime.output import run_command

run_command("report")
