"""The mathematics: token losses and group advantages, one function of tensors each. Nothing here knows a kernel or a trainer."""
