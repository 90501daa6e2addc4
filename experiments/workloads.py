"""Until `experiments/paging` is converted: what it takes from :mod:`experiments.works`."""

from experiments.works.models import HYPER as HYPER
from experiments.works.models import Work as Work
from experiments.works.reference import Contender as Contender
from experiments.works.reference import Reference as Reference
