from maxrl_fast.config.read import parse
from maxrl_fast.config.resolve import resolve
from maxrl_fast.config.rules import objective_of
from maxrl_fast.job.build import RunContext
from maxrl_fast.runtime.ranks import Ranks
from maxrl_fast.tasks.maze import MazeTask
from maxrl_fast.training.objectives.classes import PpoObjective, VerifreeObjective
from maxrl_fast.training.objectives.group import GroupObjective
from tests.tables import refused


def checked(flags):
    return parse(flags.split())


def made(flags):
    return objective_of(checked(f"--objective {flags}"))


def test_the_options_choose_the_objective():
    assert made("maxpo --k 3") is made("maxpo --k 3")  # built and tried once
    of_zvp = {"alpha": 0.3, "eps": 1e-6, "ddof": 1}
    for flags, objective in (
        ("maxrl", GroupObjective("maxrl", {"order": 15})),
        ("ppo --gae-lambda .9 --gae-gamma .99", PpoObjective(gae_gamma=0.99, gae_lambda=0.9)),
        ("rl_zvp --alpha .3", GroupObjective("rl_zvp", of_zvp, per_token=True)),
        ("verifree", VerifreeObjective()),
    ):
        assert made(flags) == objective
    assert made("grpo").aggregation == "seq_mean_token_mean"
    assert made("pacs --updates-per-step 4").updates_per_step == 4
    assert made("pacs_paper --ref-reset-interval 7").options["ref_reset_interval"] == 7
    with refused("objective must be one that .* lists"):  # a baseline only
        made("leave_two_out --k 3")
    with refused("--score rloo needs at least 2 rollouts per prompt, got 1"):
        made("pacs --rollouts 1")
    assert made("pacs --rollouts 1 --score naive").loss == "reinforce"


def test_the_defaults_that_depend_on_other_options():
    def resolved(flags):
        return resolve(checked(f"--device cpu {flags}"), MazeTask(9))

    wanted = {"gae_gamma": 1.0, "gae_lambda": 1.0, "value_clip": 0.2, "critic_lr": 2e-3}
    assert resolved("--objective ppo").parts["objective"] == wanted
    given = resolved("--objective ppo --critic-lr 3e-4").parts["objective"]
    assert given == wanted | {"critic_lr": 3e-4}
    penalised = "--overlong-buffer 8 --overlong-penalty .5 --max-new-tokens 16"
    run = RunContext.begin(resolved(penalised), MazeTask(9), Ranks())
    assert run.trainer.collector.shaping.overlong_buffer == 8
    with refused("overlong_buffer must be at most max_new_tokens, got 33 and 32"):
        resolved("--overlong-buffer 33")


def test_only_objectives_that_learn_nothing_from_equal_rewards_take_dynamic_sampling():
    learning = "nsr reinforce_raw unlikeliness maxrl_conditional bon_off_policy ppo rl_zvp verifree"
    for name in learning.split():
        with refused(f"leaves out groups of equal rewards, from which {name} learns"):
            checked(f"--objective {name} --dynamic-sampling 2")
    for name in "maxpo maxrl grpo pkpo qae opo self passk_training pacs maxpo_off_policy".split():
        checked(f"--objective {name} --dynamic-sampling 2")
