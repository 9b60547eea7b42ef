"""The warm start: supervised learning on solutions, through the same learner as reinforcement learning."""

from collections.abc import Callable

import torch
from torch import nn

from maxrl_fast.config.options import Config
from maxrl_fast.distributed.ranks import Ranks
from maxrl_fast.model.decoder import Decoder
from maxrl_fast.run.screen import Screen
from maxrl_fast.run.state import Progress
from maxrl_fast.tasks import Task
from maxrl_fast.training.learner import Learner, LossSettings, learning_rate


def warm_start(
    config: Config,
    task: Task,
    model: Decoder,
    screen: Screen,
    ranks: Ranks | None = None,
    module: nn.Module | None = None,
    *,
    progress: Progress | None = None,
    restore: Callable[[Learner], None] = lambda learner: None,
    safe_point: Callable[[Learner], None] = lambda learner: None,
) -> int:
    """Train the policy on one solution per prompt. Returns the index of the first training prompt not used.

    Args:
        progress: how many steps were done before; it is kept up to date.
        restore: puts the weights and moments of that point into the learner.
        safe_point: is called after every step.
    """
    steps, batch = config.warm_start.sft_steps or 0, config.warm_start.sft_batch
    progress = progress or Progress()
    if not steps:
        return 0
    own = config.warm_start
    config = config.replace(steps=steps, lr=own.sft_lr, beta2=own.sft_beta2, lr_schedule="cosine", warmup_steps=10)
    # With advantage 1, "reinforce" is the mean negative log-likelihood of the solutions' tokens.
    learner = Learner.of(config, model, LossSettings(loss="reinforce", aggregation="token_mean"), ranks=ranks, module=module)
    restore(learner)
    device = torch.device(config.run.device)
    advantages, sequences = torch.ones(batch, device=device), torch.arange(batch, device=device)
    with screen.stage("warm start", steps, lines=10, done=progress.step) as stage:
        for step in range(progress.step + 1, steps + 1):
            prompts, solutions = task.demonstrations((step - 1) * batch, batch)
            update = learner.update(
                prompts.to(device),
                solutions.to(device),
                advantages,
                sequences,
                when=f"warm start step {step}",
                lr=learning_rate(step, config.optimizer),
            )
            progress.step = step
            stage.advance(step, f"loss {update.loss:.3f}")
            safe_point(learner)
    return steps * batch
