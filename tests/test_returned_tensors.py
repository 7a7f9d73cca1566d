"""What a model returns is the very tensor that eager returns, or shares its memory as there."""

import pytest
import torch
from torch import Tensor, nn

import lazyinline


class Returning(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("count", torch.zeros(4))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        self.count.add_(1)
        hidden = self.linear(x)
        bias = self.linear.bias
        return (
            hidden,
            hidden,
            hidden.detach(),
            hidden[0],
            self.count,
            x,
            x[0],
            bias,
            bias.detach(),
        )


def _relations(model: Returning, x: Tensor, results: tuple[Tensor, ...]) -> list[object]:
    known = [x, model.count, model.linear.bias, *results]
    return [
        (
            [other is result for other in known],
            [other.untyped_storage()._cdata == result.untyped_storage()._cdata for other in known],
            result.requires_grad,
            result.storage_offset(),
        )
        for result in results
    ]


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_results_are_the_tensors_that_eager_returns(backend: str, train: bool) -> None:
    model = Returning()
    compiled, x = lazyinline.compile(model, backend=backend), torch.randn(3, 4)
    with torch.set_grad_enabled(train):
        wanted = model(x)
        for _ in range(2):
            found = compiled(x)
            if backend == "eager":  # planned results that share memory with each other are copies
                assert _relations(model, x, found) == _relations(model, x, wanted)
            assert any(result is x for result in found)
            assert any(result is model.count for result in found)
