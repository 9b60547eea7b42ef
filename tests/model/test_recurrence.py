import pytest
import torch
from torch import nn
from torch.nn import functional as F

from maxrl_fast.model.attention import Forest
from maxrl_fast.model.recurrence import States, over_forest
from tests.families import tiny_config, tiny_model
from tests.model.test_attention import paths_of


class Layer(nn.Module):
    """A convolution of three columns, then h_t = a_t h_{t-1} + x_t, as transformers writes such
    layers; a_t depends on the token."""

    layer_idx = 0

    def __init__(self):
        super().__init__()
        self.weight, self.mix = (nn.Parameter(torch.randn(n, n).double()) for n in (3, 3))

    def forward(self, hidden, cache_params=None, attention_mask=None):
        if attention_mask is not None:
            hidden = hidden * attention_mask[..., None]
        x, state = (hidden @ self.mix).transpose(1, 2), None
        if cache_params is not None:
            state = cache_params.get_recurrent_state(0)
            x = cache_params.update_conv_state(x, 0, conv_kernel_size=3)
        x = F.conv1d(F.pad(x, (2, 0)), self.weight[:, None], groups=3)[..., -hidden.shape[1] :]
        outputs = []
        for t in range(hidden.shape[1]):
            kept = hidden[:, t].sigmoid() * (0.0 if state is None else state)
            state = kept + x[..., t]
            outputs.append(state)
        if cache_params is not None:
            cache_params.update_recurrent_state(state, 0)
        return torch.stack(outputs, 1)


def forest_of(generator, depth):
    lengths, parents, path = list[int](), list[int](), list[int]()
    for _ in range(int(torch.randint(1, 9, (), generator=generator))):
        keep = int(torch.randint(0, min(len(path), depth) + 1, (), generator=generator))
        path = path[:keep]
        lengths.append(int(torch.randint(1, 6, (), generator=generator)))
        parents.append(path[-1] if path else -1)
        path.append(len(lengths) - 1)
    return Forest(torch.tensor(lengths), torch.tensor(parents), torch.device("cpu"))


def check_equal(layer, forest, size, dtype, **limits):
    """Outputs and all gradients, where every output has another weight."""
    hidden = torch.randn(int(forest.lengths.sum()), size, dtype=dtype).requires_grad_()

    def run(x, states, mask):
        return layer(x, cache_params=states, attention_mask=mask)

    ours, theirs = over_forest(run, hidden, forest.padded)[0], torch.zeros_like(hidden)
    for own, path in paths_of(forest.lengths.tolist(), forest.parents.tolist()):
        theirs = theirs.index_copy(0, own, layer(hidden[path][None])[0, -len(own) :])
    torch.testing.assert_close(ours, theirs, **limits)
    weights, of = torch.randn_like(ours), [hidden, *layer.parameters()]
    grads = (torch.autograd.grad((x * weights).sum(), of) for x in (ours, theirs))
    for one, other in zip(*grads, strict=True):
        scale = max(float(other.abs().max()), 1e-3)
        torch.testing.assert_close(one / scale, other / scale, **limits)


def test_outputs_and_gradients_of_200_random_forests():
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    for case in range(200):
        forest = forest_of(generator, case % 6)
        check_equal(Layer(), forest, 3, torch.float64, rtol=1e-9, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_5_text", "qwen3_next", "olmo_hybrid", "bamba"])
def test_layers_of_transformers(family):
    model = tiny_model(tiny_config(family))
    layers = [x for x in model.modules() if type(x).__name__.endswith(("DeltaNet", "Mixer"))]
    generator = torch.Generator().manual_seed(1)
    torch.manual_seed(1)
    for case in range(12):
        forest = forest_of(generator, case % 6)
        check_equal(layers[0], forest, 32, torch.float32, rtol=1e-4, atol=3e-5)


def test_states_after_the_roots_continue_them():
    torch.manual_seed(2)
    layer, forest = Layer(), Forest.roots(torch.tensor([4, 1, 6]))
    hidden, more = torch.randn(11, 3).double(), torch.randn(3, 1, 3).double()
    states = over_forest(lambda x, s, m: layer(x, s, m), hidden, forest.padded)[1]
    assert isinstance(states, States)
    for i, part in enumerate(hidden.split([4, 1, 6])):
        whole = layer(torch.cat([part, more[i]])[None])[0, -1:]
        own = states.rows(torch.tensor([i]))
        torch.testing.assert_close(layer(more[i][None], own)[0], whole)
