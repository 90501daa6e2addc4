"""Until `experiments/paging` is converted: another name of :mod:`experiments.harness.time`."""

import sys

import experiments.harness.time as real
from experiments.harness.time import *  # noqa: F403

sys.modules[__name__] = real
