"""The mathematics: token losses and group advantages, each a function of tensors. It knows neither
kernels nor trainers."""
