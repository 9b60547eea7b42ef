"""Losses without the trainer, for your own training loop: `python examples/token_loss.py`.

A policy, which is one matrix, answers eight prompts with one token each; one token of 64 is
correct. It is trained by MaxRL with the PPO loss, and then from scratch by PACS, in seconds.
"""

import argparse

import torch

from maxrl_fast import ops

G, N, H, V, STEPS = 8, 16, 32, 64, 200
generator = torch.Generator().manual_seed(0)
hidden = torch.randn(G, H, generator=generator)  # [G, H], the last hidden states of a model
answers = torch.randint(V, (G,), generator=generator)
cu_seqlens = torch.arange(G * N + 1)  # packed responses with one token each


def pass_rate(weight: torch.Tensor) -> float:
    return (hidden @ weight.T).softmax(-1)[torch.arange(G), answers].mean().item()


def by_maxrl(
    states: torch.Tensor, weight: torch.Tensor, tokens: torch.Tensor, rewards: torch.Tensor
) -> torch.Tensor:
    advantages = ops.maxrl_advantage(rewards).flatten()  # [S]
    # stores no logits
    loss, _ = ops.linear_policy_gradient_loss(states, weight, tokens, advantages, cu_seqlens)
    return loss


def by_pacs(
    states: torch.Tensor, weight: torch.Tensor, tokens: torch.Tensor, rewards: torch.Tensor
) -> torch.Tensor:
    logprobs, _ = ops.linear_token_logprobs(states, weight, tokens)
    # the sampling policy is the reference
    proxies = ops.log_ratio_reward(logprobs, logprobs.detach(), cu_seqlens)
    loss, _ = ops.pacs_loss(proxies, rewards.flatten(), N)
    return loss


def main() -> None:
    """Train by both, and print the pass rates."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    for name, loss_of in (("MaxRL", by_maxrl), ("PACS", by_pacs)):
        weight = torch.zeros(V, H, requires_grad=True)  # a uniform policy
        optimizer = torch.optim.Adam([weight], lr=0.02)
        before = pass_rate(weight)
        for _ in range(STEPS):
            probabilities = (hidden @ weight.detach().T).softmax(-1)
            # [G, N]
            samples = torch.multinomial(probabilities, N, replacement=True, generator=generator)
            rewards = (samples == answers[:, None]).float()
            loss = loss_of(hidden.repeat_interleave(N, 0), weight, samples.flatten(), rewards)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(
            f"{name:<6} pass rate {before:.3f} before, {pass_rate(weight):.3f} after {STEPS} steps"
        )


if __name__ == "__main__":
    main()
