"""The mathematics: token losses and group advantages, one function of tensors each. Nothing here knows kernels or trainers."""
