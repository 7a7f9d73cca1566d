"""PyTorch's recurrent networks run in kernels of PyTorch's own, between parts that are compiled."""

from typing import Any

import pytest
import torch
from comparing import assert_equals_eager
from torch import Tensor, nn


class Tagger(nn.Module):
    """A recurrent network between others, with its hidden state in and out."""

    def __init__(self, kind: Any, **options: Any) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(3, 6), nn.GELU(), nn.Linear(6, 3))
        self.rnn = kind(3, 4, **options)

    def forward(self, x: Tensor, state: Any = None) -> Any:
        return self.rnn(self.first(x), state)


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
    x = torch.randn(2, 2, 3)
    state = torch.utils._pytree.tree_map(Tensor.detach, model(x)[1])
    compiled = assert_equals_eager(
        model,
        batches=[(x,), (x, state), (x, state)],
        optimizer=lambda parameters: torch.optim.SGD(parameters, 0.1),
    ).compiled
    parts = {part.path: part.ran_eagerly for part in compiled.last_report.parts}
    assert not parts["first"]
    assert "loops over its steps" in parts["rnn"]
