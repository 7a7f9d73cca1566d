"""How often a model is compiled, and how many of its programs are kept."""

import logging
import threading
import warnings

import torch
from torch import nn

import lazyinline

logger = logging.getLogger(__name__)


def num_compiles(compiled: nn.Module) -> int:
    return len(compiled.__dict__["_lazyinline_entries"])


class Talking(nn.Module):
    """Says what it does, as models of libraries do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logger.warning("the loss type is unknown")
        warnings.warn("the loss type is unknown", stacklevel=2)
        return self.linear(x)


def test_what_the_process_does_beside_a_model_that_logs_compiles_nothing_anew() -> None:
    logger.addHandler(logging.NullHandler())
    compiled, x = lazyinline.compile(Talking(), backend="eager"), torch.ones(2, 3)
    going = threading.Event()
    thread = threading.Thread(target=going.wait)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled(x)
        thread.start()
        logging.getLogger(f"{__name__}.another").addHandler(logging.StreamHandler())
        compiled(x)
        going.set()
        thread.join()
        compiled(x)
    assert num_compiles(compiled) == 1
