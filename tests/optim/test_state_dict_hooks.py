"""Hooks behind a state dict: what they see, and what is returned."""

from typing import Any

import pytest
import torch
from optim_support import trained
from stand_ins import raising

from pagedopt import PagedAdamW


@pytest.mark.parametrize("returned", [{"mine": 1}, [], {"param_groups": 7, "state": None}, None], ids=str)
@pytest.mark.parametrize(("kind", "save"), [(torch.optim.AdamW, "state_dict"), (PagedAdamW, "state_dict"),
                                            (PagedAdamW, "decoded_state_dict")])  # fmt: skip
def test_what_a_hook_on_state_dict_returns_is_returned(kind: Any, save: str, returned: Any) -> None:
    """The object itself, whatever it is; without one, the dict that hooks saw and may have changed."""
    _, opt = trained(1, kind)
    opt.add_param_group({"params": [torch.nn.Parameter(torch.ones(3))], "state_format": "int8", "rounding": "nearest"})
    seen: list[Any] = []
    opt.register_state_dict_post_hook(lambda _, found: seen.append(found) or found.update(note=3))
    opt.register_state_dict_post_hook(lambda _, found: seen.append(found) or returned)
    found = getattr(opt, save)()
    assert seen[0] is seen[1]
    assert found is (seen[0] if returned is None else returned)
    assert seen[0]["note"] == 3
    if kind is PagedAdamW:
        assert not any("state_format" in group for group in seen[0]["param_groups"])
        assert {"state_format", "rounding"} < opt.param_groups[-1].keys(), "the optimizer's own group"
    assert len(opt._optimizer_state_dict_post_hooks) == 2


def with_codes() -> PagedAdamW:
    opt = PagedAdamW([torch.nn.Parameter(torch.ones(70, 70))], state_format="int8")
    state = {"step": 1, "exp_avg": torch.ones(70, 70), "exp_avg_sq": torch.ones(70, 70)}
    opt.load_state_dict({**opt.state_dict(), "state": {0: state}})
    return opt


def test_hooks_on_state_dict_see_decoded_state_where_that_is_asked_for() -> None:
    opt = with_codes()
    opt.register_state_dict_post_hook(lambda _, found: list(found["state"][0]))
    assert opt.decoded_state_dict() == ["step", "exp_avg", "exp_avg_sq"]
    assert opt.state_dict()[1:3] == ["exp_avg.root3", "exp_avg.absmax"]


def test_an_interrupt_of_decoding_leaves_codes_in_later_state_dicts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even one that comes when torch has the hook that decodes, and nobody has what would take it back."""
    opt = with_codes()
    with monkeypatch.context() as patch:
        patch.setattr(torch.utils.hooks.RemovableHandle, "__enter__", raising(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            opt.decoded_state_dict()
    assert list(opt.state_dict()["state"][0])[1:3] == ["exp_avg.root3", "exp_avg.absmax"]
