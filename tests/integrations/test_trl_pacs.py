import pytest
import torch

from maxrl_fast.model.checkpoint import load_checkpoint
from maxrl_fast.records import Rollouts, Samples
from maxrl_fast.training.learner import Learner, LossSettings
from maxrl_fast.training.objectives.registry import make_objective
from tests.batches import collected, make_prompts
from tests.integrations.test_trl import job
from tests.models import updated

pytestmark = pytest.mark.integrations
__all__ = ["job"]  # a fixture


def updates_of(job, folder, **options):
    """Train, and return the trainer and each update: weights of the sampler, weights before it,
    gradients, rows of the loss."""
    from transformers import TrainerCallback

    class Updates(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, model=None, **_):
            trainer = self.trainer
            weights = {name: weight.clone() for name, weight in model.state_dict().items()}
            gradients = {name: weight.grad.clone() for name, weight in model.named_parameters()}
            found.append((trainer.sampler, weights, gradients, trainer.seen[self.num_seen :]))
            self.num_seen = len(trainer.seen)

    found, updates = [], Updates()
    updates.num_seen = 0
    trainer = job.build("pacs", folder, callbacks=[updates], **options)
    updates.trainer = trainer
    job.train(trainer)
    trainer.model.save_pretrained(folder / "model")
    return trainer, found


def our_gradients(folder, sampler, weights, rows, rewards, **options):
    """Return gradients and advantages of pacs and Learner, those that were seen, and the part of
    the rollouts whose reward is known."""
    model = load_checkpoint(folder / "model")
    model.load_state_dict(sampler)
    rows = sorted(rows)  # groups are adjacent: no two prompts are equal
    known = torch.tensor([rewards[tuple(ids)] for _, ids, _ in rows])
    samples = Samples(
        make_prompts([prompt for prompt, *_ in rows[::4]]),
        Rollouts.given([ids for _, ids, _ in rows]),
    )
    batch = collected(samples, known.nan_to_num().view(-1, 4), ~known.isnan().view(-1, 4))
    objective = make_objective("pacs", options, 4, 2)
    settings = LossSettings(objective.loss, objective.aggregation)
    learner = Learner(
        model, torch.optim.SGD(model.parameters(), lr=0.0), settings, 1e9, 10**6, torch.float32
    )
    step = objective.begin(batch, learner)
    model.load_state_dict(weights)
    sequences = batch.minibatches(1)[0]
    advantages = step.advantages(sequences)
    updated(learner, samples, advantages, sequences, when="an update", lr=0.0)
    seen = torch.tensor([advantage for *_, advantage in rows])
    gradients = {name: weight.grad for name, weight in model.named_parameters()}
    return gradients, advantages, seen, len(sequences) / len(rows)


TWO = {"gradient_accumulation_steps": 2}
CASES = {
    "one update per batch": (TWO, {}),
    "more epochs over a batch": ({**TWO, "num_iterations": 2}, {"beta": 3.0}),
    "several updates per batch": ({**TWO, "steps_per_generation": 4}, {"score": "dr_grpo"}),
}


@pytest.mark.parametrize("case", CASES)
def test_the_gradient_is_that_of_our_trainer(job, tmp_path, case):
    config, options = CASES[case]
    names = {"beta": "pacs_beta", "score": "pacs_score"}
    arguments = {names[name]: value for name, value in options.items()}
    config = config | {"max_steps": 4, "learning_rate": 3e-2}
    trainer, updates = updates_of(job, tmp_path, config=config, arguments=arguments, unknown=True)
    rewards = {
        tuple(ids): one
        for rows in trainer.generated
        for ids, (one,) in zip(rows["responses"], rows["rewards"], strict=True)
    }
    assert len(updates) == 4
    num_moved, all_known = 0, []
    for sampler, weights, gradients, rows in updates:
        wanted, advantages, seen, known = our_gradients(
            tmp_path, sampler, weights, rows, rewards, **options
        )
        all_known.append(known)
        torch.testing.assert_close(seen, advantages, rtol=1e-4, atol=1e-5)
        assert seen.abs().max() > 0.1
        # TRL divides by all rollouts, our trainer by those whose reward is known
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, wanted[name] * known, rtol=1e-3, atol=2e-5)
        num_moved += any(not torch.equal(weights[name], sampler[name]) for name in weights)
    assert min(all_known) < 1
    assert num_moved == (0 if case == "one update per batch" else 2)
