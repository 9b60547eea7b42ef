"""Which objective, loss and correction the options choose, and which options do not go together."""

from maxrl_fast.config.read import parse
from maxrl_fast.config.resolve import resolve
from maxrl_fast.config.rules import correction_of, objective_of
from maxrl_fast.job.build_task import build_length_penalty
from maxrl_fast.tasks.maze import MazeTask
from maxrl_fast.training.collect import LengthPenalty
from maxrl_fast.training.correction import CORRECTIONS, ImportanceWeights
from maxrl_fast.training.objectives.group import GroupObjective
from maxrl_fast.training.objectives.off_policy import OffPolicyObjective
from maxrl_fast.training.objectives.pacs import PacsObjective, PacsPaperObjective
from maxrl_fast.training.objectives.ppo import PpoObjective
from maxrl_fast.training.objectives.riskpo import RiskpoObjective
from maxrl_fast.training.objectives.verifree import VerifreeObjective
from maxrl_fast.training.objectives.zvp import ZvpObjective
from tests.tables import refused


def checked(flags):
    return parse(flags.split())


def made(flags):
    return objective_of(checked(f"--objective {flags}"))


def test_the_options_choose_the_objective():
    assert made("maxpo --k 3") is made("maxpo --k 3")  # built and tried once
    for flags, objective in (
        ("maxpo --k 3", GroupObjective("maxpo", {"k": 3})),
        ("maxrl", GroupObjective("maxrl", {"order": 15})),
        ("grpo --eps 1e-3", GroupObjective("grpo", {"eps": 1e-3, "ddof": 1})),
        ("pacs --beta 0.5 --score grpo", PacsObjective(beta=0.5, score="grpo")),
        ("pacs_paper --ref-reset-interval 7", PacsPaperObjective(ref_reset_interval=7)),
        (
            "maxpo_off_policy --k 3 --clamp-delta 0.5",
            OffPolicyObjective("maxpo_off_policy", {"k": 3, "clamp_delta": 0.5}),
        ),
        ("ppo --gae-lambda .9 --gae-gamma .99", PpoObjective(gae_gamma=0.99, gae_lambda=0.9)),
        ("rl_zvp --alpha .3 --eps 1e-3", ZvpObjective(alpha=0.3, eps=1e-3)),
        ("riskpo --bundle-size 4", RiskpoObjective(bundle_size=4)),
        ("verifree", VerifreeObjective()),
    ):
        assert made(flags) == objective
    assert made("grpo").aggregation == "seq_mean_token_mean"
    assert made("pacs --updates-per-step 4").updates_per_step == 4


def test_the_defaults_that_depend_on_other_options():
    def resolved(flags):
        return resolve(checked(f"--device cpu {flags}"), MazeTask(9))

    wanted = {"gae_gamma": 1.0, "gae_lambda": 1.0, "value_clip": 0.2, "critic_lr": 2e-3}
    assert resolved("--objective ppo").parts["objective"] == wanted
    given = resolved("--objective ppo --critic-lr 3e-4").parts["objective"]
    assert given == wanted | {"critic_lr": 3e-4}
    for flags, penalty in (
        ("", None),
        ("--overlong-buffer 8", LengthPenalty(32, 8, 1.0)),
        (
            "--overlong-buffer 8 --overlong-penalty .5 --max-new-tokens 16",
            LengthPenalty(16, 8, 0.5),
        ),
    ):
        assert build_length_penalty(resolved(flags)) == penalty
    with refused("overlong_buffer must be at most max_new_tokens, got 33 and 32"):
        resolved("--overlong-buffer 33")


def test_options_choose_the_correction():
    def chosen(flags):
        name, numbers = correction_of(checked(flags))
        correction = CORRECTIONS[name].function(**numbers)
        return numbers.get("delta") if correction is None else correction

    def weights(low, high, of_sequence, masks):
        return ImportanceWeights(low, high, of_sequence=of_sequence, masks=masks)

    for flags, wanted in (
        ("", None),
        ("--rollout vllm --objective pacs", None),
        ("--rollout vllm --correction none", None),
        ("--rollout vllm", weights(0.0, 2.0, False, False)),
        ("--importance-cap 2", weights(0.0, 2.0, False, False)),
        ("--correction tis", weights(0.0, 2.0, False, False)),
        ("--correction tis_sequence --importance-cap 3", weights(0.0, 3.0, True, False)),
        ("--correction icepop", weights(0.5, 5.0, False, True)),
        ("--correction mis --mis-high 4", weights(0.0, 4.0, True, True)),
        ("--correction sequence_mask --delta 0.1", 0.1),
    ):
        assert chosen(flags) == wanted, flags


def test_only_objectives_that_learn_nothing_from_equal_rewards_take_dynamic_sampling():
    learning = "nsr reinforce_raw unlikeliness maxrl_conditional bon_off_policy ppo rl_zvp verifree"
    for name in learning.split():
        with refused(f"leaves out groups of equal rewards, from which {name} learns"):
            checked(f"--objective {name} --dynamic-sampling 2")
    for name in "maxpo maxrl grpo pkpo qae opo self passk_training pacs maxpo_off_policy".split():
        checked(f"--objective {name} --dynamic-sampling 2")
