"""PyTorch's recurrent networks run in kernels of PyTorch's own, between parts that are compiled."""

from typing import Any

import pytest
import torch
from comparing import assert_close, assert_same_gradients, twin
from torch import Tensor, nn

import lazyinline


class Tagger(nn.Module):
    """A recurrent network between others, with its hidden state in and out."""

    def __init__(self, kind: Any, **options: Any) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(3, 6), nn.GELU(), nn.Linear(6, 3))
        self.rnn = kind(3, 4, **options)

    def forward(self, x: Tensor, state: Any = None) -> Any:
        return self.rnn(self.first(x), state)


def leaves(result: Any) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else [x for part in result for x in leaves(part)]


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (nn.LSTM, {"num_layers": 2, "batch_first": True, "dropout": 0.5}),
        (nn.LSTM, {"proj_size": 2, "bidirectional": True}),
        (nn.GRU, {"bidirectional": True, "bias": False}),
        (nn.RNN, {"nonlinearity": "relu"}),
    ],
    ids=str,
)
@pytest.mark.sweep(keep=["proj_size"])
def test_a_recurrent_network_trains_like_eager(kind: Any, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = Tagger(kind, **options)
    expected, x = twin(model), torch.randn(2, 2, 3)
    compiled = lazyinline.compile(model, backend="eager")
    optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in (model, expected)]
    states: list[Any] = [None, None]
    for _ in range(3):
        results = []
        for which, run in enumerate((compiled, expected)):
            optimizers[which].zero_grad()
            torch.manual_seed(0)
            result = run(x, states[which])
            sum(t.square().sum() for t in leaves(result)).backward()
            states[which] = torch.utils._pytree.tree_map(Tensor.detach, result[1])
            results.append(result)
        assert_close(*results)
        assert_same_gradients(model, expected)
        for optimizer in optimizers:
            optimizer.step()
    parts = {part.path: part.ran_eagerly for part in compiled.last_report.parts}
    assert not parts["first"]
    assert "loops over its steps" in parts["rnn"]
