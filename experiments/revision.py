"""Until `experiments/paging` is converted: another name of :mod:`experiments.harness.revision`."""

import sys

import experiments.harness.revision as real
from experiments.harness.revision import *  # noqa: F403

sys.modules[__name__] = real
