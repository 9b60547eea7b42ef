"""Which objective, loss and correction the options choose, and which options do not go together."""

import pytest

from maxrl_fast.config.checks import check, correction_of, objective_of
from maxrl_fast.config.parse import parse
from maxrl_fast.config.resolve import resolve
from maxrl_fast.job.build_task import build_length_penalty
from maxrl_fast.tasks.maze import MazeTask
from maxrl_fast.training.collect import LengthPenalty
from maxrl_fast.training.correction import CORRECTIONS, ImportanceWeights
from maxrl_fast.training.objectives.group import GroupObjective
from maxrl_fast.training.objectives.objective import Needs
from maxrl_fast.training.objectives.off_policy import OffPolicyObjective
from maxrl_fast.training.objectives.pacs import PacsObjective, PacsPaperObjective
from maxrl_fast.training.objectives.ppo import PpoObjective
from maxrl_fast.training.objectives.riskpo import RiskpoObjective
from maxrl_fast.training.objectives.verifree import VerifreeObjective
from maxrl_fast.training.objectives.zvp import ZvpObjective
from tests.tables import refused, table


def checked(flags):
    config = parse(flags.split())
    check(config)
    return config


def made(flags):
    return objective_of(checked(f"--objective {flags}"))


def test_the_options_choose_the_objective():
    assert made("maxpo --k 3") is made("maxpo --k 3")  # built and tried once
    assert made("maxpo --k 3") == GroupObjective("maxpo", {"k": 3})
    assert made("maxrl") == GroupObjective("maxrl", {"order": 15})
    assert made("grpo --eps 1e-3").options == {"eps": 1e-3, "ddof": 1}
    assert made("grpo").aggregation == "seq_mean_token_mean"
    pacs = made("pacs --beta 0.5 --score grpo --updates-per-step 4")
    assert (pacs, pacs.updates_per_step) == (PacsObjective(beta=0.5, score="grpo"), 4)
    assert made("pacs_paper --ref-reset-interval 7") == PacsPaperObjective(ref_reset_interval=7)
    off_policy = made("maxpo_off_policy --k 3 --clamp-delta 0.5")
    assert off_policy == OffPolicyObjective("maxpo_off_policy", {"k": 3, "clamp_delta": 0.5})
    assert made("maxrl_off_policy").options == {"order": 15, "clamp_delta": 0.0}
    ppo = made("ppo --gae-lambda .9 --gae-gamma .99 --rollouts 1")
    assert ppo == PpoObjective(gae_gamma=0.99, gae_lambda=0.9)
    assert made("rl_zvp --alpha .3 --eps 1e-3") == ZvpObjective(alpha=0.3, eps=1e-3)
    assert made("riskpo --bundle-size 4") == RiskpoObjective(bundle_size=4)
    for name in ("pacs", "pacs_paper", "rl_zvp", "maxpo_off_policy", "verifree", "ppo"):
        objective = made(f"{name} --updates-per-step 4")
        per_token = name in ("rl_zvp", "verifree", "ppo")
        assert objective.needs == Needs(
            reference=name == "pacs_paper",
            binary=name in ("pacs", "pacs_paper", "rl_zvp"),
            token_weights=per_token,
            answers=name == "verifree",
            critic=name == "ppo",
            logprob_passes={"pacs": 2, "pacs_paper": 2, "ppo": 0}.get(name, 1),
        )
        loss, aggregation = "reinforce", "seq_mean_token_sum"
        if name in ("rl_zvp", "ppo"):
            loss, aggregation = "ppo", "token_mean"
        assert (objective.loss, objective.aggregation) == (loss, aggregation)
    assert made("verifree") == VerifreeObjective()


def test_the_defaults_that_depend_on_other_options():
    def options(flags):
        return resolve(checked(f"--objective ppo {flags}"), MazeTask(9)).objective.options

    wanted = {"gae_gamma": 1.0, "gae_lambda": 1.0, "value_clip": 0.2, "critic_lr": 2e-3}
    assert options("") == wanted
    assert options("--critic-lr 3e-4") == wanted | {"critic_lr": 3e-4}

    def penalty(flags):
        return build_length_penalty(resolve(checked(f"--device cpu {flags}"), MazeTask(9)))

    assert penalty("") is None
    assert penalty("--overlong-buffer 8") == LengthPenalty(32, 8, 1.0)
    flags = "--overlong-buffer 8 --overlong-penalty .5 --max-new-tokens 16"
    assert penalty(flags) == LengthPenalty(16, 8, 0.5)


def test_options_choose_the_correction():
    def chosen(flags):
        name, numbers = correction_of(checked(flags))
        correction = CORRECTIONS[name].function(**numbers)
        return numbers.get("delta") if correction is None else correction

    def weights(low, high, of_sequence, masks):
        return ImportanceWeights(low, high, of_sequence=of_sequence, masks=masks)

    for flags in ("", "--top-p 0.9", "--rollout vllm --objective pacs"):
        assert chosen(flags) is None
    for flags in ("--rollout vllm --correction none", "--rollout vllm --importance-cap 0"):
        assert chosen(flags) is None
    for flags in ("--rollout vllm", "--importance-cap 2", "--correction tis"):
        assert chosen(flags) == weights(0.0, 2.0, False, False)
    of_sequence = chosen("--correction tis_sequence --importance-cap 3")
    assert of_sequence == weights(0.0, 3.0, True, False)
    assert chosen("--correction icepop") == weights(0.5, 5.0, False, True)
    mis = chosen("--correction mis --correction-options high=4")
    assert mis == weights(0.0, 4.0, True, True)
    assert chosen("--correction sequence_mask --correction-options delta=0.1") == 0.1


REFUSALS = """
    --objective pacs --correction tis | pacs does not support --correction: .*, got tis
    --objective maxpo_off_policy --correction sequence_mask | does not support --correction
    --objective rl_zvp --correction sequence_mask | rl_zvp weights single tokens by either sign
    --correction icepop --importance-cap 2 | --importance-cap is not used by correction icepop
    --correction tis --correction-options low=1 | --correction-options needs --correction icepop
    --correction-options low=1 | --correction-options needs --correction
    --correction icepop --correction-options lo=1 | icepop takes the options low, high, got 'lo'
    --correction icepop --correction-options low=6 | low of icepop must be below high, got 6 and 5
    --correction mis --correction-options high=nan | high of mis must be a finite number of at
        least 0, got nan
    --correction sequence_mask --correction-options delta | must be NAME=VALUE with a number
    --rollout vllm --top-p 0.9 --temperature 0.7 | --rollout vllm with --top-p 0.9 needs
        --temperature 1, got 0.7
    --objective maxpo_off_policy --loss ppo | loss must be reinforce for maxpo_off_policy
    --objective maxpo_off_policy --clamp-delta -1 | clamp_delta of maxpo_off_policy must be a finite
        number of at least 0, got -1
    --objective maxpo_off_policy --k 16 | maxpo_off_policy needs 1 <= k <= N-1 = 15
    --objective ppo --loss gspo | ppo weights single tokens, so loss cannot be gspo
    --objective ppo --gae-lambda 1.1 | gae_lambda of ppo must be a number from 0 to 1, got 1.1
    --objective ppo --critic-lr 0 | critic_lr of ppo must be a finite number above 0, got 0
    --objective ppo --k 2 | --k is not used by objective ppo
    --objective maxrl --value-clip .1 | --value-clip is not used by objective maxrl
    --objective rl_zvp --loss vespo | loss cannot be vespo, whose ratio is one of whole responses
    --objective rl_zvp --ddof 2 | ddof of rl_zvp must be 0 or 1, got 2
    --objective rl_zvp --overlong-buffer 2 | overlong_buffer makes rewards other than 0 and 1, which
        rl_zvp does not support
    --objective riskpo | prompts must be a multiple of bundle_size, got 32 and 5
    --objective riskpo --prompts 5 --rollouts 1 | riskpo needs at least 2 rollouts per prompt, got 1
    --objective verifree --rollouts 1 | verifree needs at least 2 rollouts per prompt, got 1
    --objective verifree --loss gspo | verifree weights single tokens, so loss cannot be gspo
    --objective verifree --reward-source vote | reward_source must be given for verifree, which
        computes its own reward, got vote
    --objective verifree --overlong-buffer 2 | verifree does not support --overlong-buffer: its
        reward is a probability
    --objective pacs --reward-source rlpr | reward_source cannot be rlpr for pacs, which needs
        rewards of 0 or 1
    --objective remax --reward-source logprob | --reward-source logprob does not support remax: it
        needs individual rewards
    --objective rloo --reward-source logprob | reward_source cannot be logprob for task maze, whose
        responses are answers without
    --overlong-buffer 4 --overlong-penalty 0 | overlong_penalty must be a finite number above 0
    --overlong-penalty 2 | --overlong-penalty needs --overlong-buffer
    --overlong-buffer 4 --objective pacs | overlong_buffer makes rewards other than 0 and 1, which
    --objective gdpo | gdpo needs each reward separately: --reward needs 2 or more
    --objective hero --reward a.py:f | hero needs each reward separately: --reward needs 2 or more,
        got a.py:f
    --objective gdpo --reward a.py:f a.py:g --reward-threshold .5 | reward_threshold would change
        none of them
    --objective gdpo --reward a.py:f a.py:g --overlong-buffer 4 | overlong_buffer would change none
        of them
    --objective hero --reward a.py:f a.py:g --reward-weights 2 1 | hero needs 1 as the weight of the
        verifier
    --objective hero --reward a.py:f a.py:g --score-range 0.7 | score_range of hero must be above 0
        and below .5
    --loss nowhere.py:f | there is no file nowhere\\.py
    --objective nowhere.py:f | there is no file nowhere\\.py
"""


@pytest.mark.parametrize(("flags", "message"), table(REFUSALS))
def test_options_that_do_not_go_together_are_refused(flags, message):
    with refused(message):
        checked(flags)


def test_a_length_penalty_is_at_most_as_long_as_the_responses():
    with refused("overlong_buffer must be at most max_new_tokens, got 33 and 32"):
        resolve(checked("--device cpu --overlong-buffer 33"), MazeTask(9))


LEARNING = "nsr reinforce_raw unlikeliness maxrl_conditional bon_off_policy ppo rl_zvp verifree"


def test_only_objectives_that_learn_nothing_from_equal_rewards_take_dynamic_sampling():
    for name in LEARNING.split():
        with refused(f"leaves out groups whose rewards are equal, from which {name} learns"):
            checked(f"--objective {name} --dynamic-sampling 2")
    for name in "maxpo maxrl grpo pkpo qae opo self passk_training pacs maxpo_off_policy".split():
        checked(f"--objective {name} --dynamic-sampling 2")
