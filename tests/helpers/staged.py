"""Both ways in which a staged step goes: as a CUDA graph, once it repeats, and call by call."""

from __future__ import annotations

import pytest

#: Runs each test of a module in both; see the fixture ``staged``.
both_ways = pytest.mark.parametrize("staged", ["graph", "calls"], indirect=True)
#: Runs each test call by call alone: what it hits are the calls.
call_by_call = pytest.mark.parametrize("staged", ["calls"], indirect=True)
