"""Contract with torch.distributed.pipelining: what its schedules ask of a stage.

When a new torch breaks one of these, ``pipeline_parallel/torch_pipelining.py`` is the
file to look at.
"""

import inspect
import re

import pytest
from torch.distributed.pipelining import PipelineStage, schedules

from lazyinline.pipeline_parallel.torch_pipelining import ClosureStage, action_table

pytestmark = pytest.mark.smoke

# Asked for by schedules, and right as PyTorch's stage does it.
INHERITED = {"is_first", "is_last", "has_backward", "group_rank", "group_size", "num_stages"}
INHERITED |= {"device", "stage_index", "stage_index_to_group_rank", "submod", "output_chunks"}
INHERITED |= {"args_recv_info", "act_send_info"}
# After metadata inference, which is replaced: looks for FSDP modules in an empty module.
INHERITED |= {"_post_metadata_inference_cleanup", "_inference_mode"}
# Since torch 2.15. The set-up of process groups, and metadata of an empty module.
INHERITED |= {"p2p_per_edge", "_p2p_edge_groups", "_parent_group", "_user_meta"}
INHERITED |= {"_pre_metadata_inference_backup"}
# What PyTorch's forward keeps, which is replaced; and what is called of an FSDP module only.
INHERITED |= {"release_fwd_send_outputs"}
INHERITED |= {"start_gradient_reduction", "wait_for_gradient_reduction"}


def test_what_is_overridden_exists() -> None:
    own = {"give", "steps", "doing"}
    names = [n for n, f in vars(ClosureStage).items() if inspect.isfunction(f)]
    helpers = {"__init__", "_receive", "_send", "_operation", "_take", "_is_here", "_rank_of", *own}
    # Present from torch 2.12, 2.13 or 2.15 on, or until then.
    sometimes = {"_warmup_forward_vote", "_warmup_backward_result", "_get_init_p2p_neighbors_ops"}
    sometimes |= {"_clear_unlaunched_fwd_recv", "_clear_unlaunched_bwd_recv"}
    missing = [n for n in names if n not in helpers | sometimes and not hasattr(PipelineStage, n)]
    assert not missing, f"PipelineStage has no {missing} any more"


def test_schedules_ask_a_stage_for_nothing_else() -> None:
    source = inspect.getsource(schedules)
    asked = set(
        re.findall(r"\b(?:self\._stage|stage|stage_index_to_stage\[[^]]*\])\.(\w+)", source)
    )
    overridden = set(vars(ClosureStage))
    assert "forward_one_chunk" in asked, "the pattern finds nothing"
    assert not asked - overridden - INHERITED, "schedules ask for something new"


def test_steps_are_called_with_the_arguments_that_are_known() -> None:
    for name in ("forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk"):
        theirs = inspect.signature(getattr(PipelineStage, name)).parameters
        ours = inspect.signature(getattr(ClosureStage, name)).parameters
        assert list(theirs) == list(ours), name


def test_the_action_table_has_the_kinds_that_are_known() -> None:
    kinds = {kind.name: kind.value for kind in schedules.FORWARD.__class__}
    assert kinds["FORWARD"] == "F" and kinds["FULL_BACKWARD"] == "B"
    assert kinds["BACKWARD_INPUT"] == "I" and kinds["BACKWARD_WEIGHT"] == "W"
    assert action_table("1F1B", 2, 2, 4).ranks[1][0].micro_batch == 0
