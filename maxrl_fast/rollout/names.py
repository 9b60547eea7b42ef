"""The names that --rollout takes, besides those of classes."""

ENGINES = ("native", "vllm")
