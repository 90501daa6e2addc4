"""What `optimizer.start()` brings: a queued update that begins behind `step()`, and not with the forward.

    python scripts/start_early.py          # on a GPU; a minute
    python scripts/start_early.py --quick  # toys, on a CPU, too

In each iteration a loader keeps the host for 10 or 50 ms behind `step()`, then a batch is copied.  The loss
is read in each iteration, or never: then the host is ahead, and the loader works while the GPU has a backward to do.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
import warnings

import torch

from experiments.works.hidden import HIDDEN, MODELS, maker
from experiments.works.training import Load, Training
from pagedopt.planning.sizes import SIZES


def took(training: Training, batch: torch.Tensor, loader: float, early: bool, reads: bool, count: int) -> float:
    """Milliseconds of an iteration: the mean of some."""
    begin = time.perf_counter()
    for _ in range(count):
        training.gradients()
        training.step()
        if early:
            training.optimizer.start()
        if reads and training.device.type == "cuda":
            torch.cuda.current_stream().synchronize()
        time.sleep(loader)
        training.tokens.copy_(batch, non_blocking=True)
    training.optimizer.wait()
    training.wait()
    return (time.perf_counter() - begin) * 1e3 / count


def main(quick: bool) -> None:
    """Print a line for each loop: without `start()`, with it, and what that saves."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for name, state in itertools.product(MODELS, ("int8", "float32")):
        training = Training(
            device, SIZES["tiny" if quick else MODELS[name]], Load(1 if quick else 8), maker(HIDDEN, state)
        )
        training.optimizer.attach(training.model)
        batch = training.tokens.cpu().pin_memory() if device.type == "cuda" else training.tokens.clone()
        for loader, reads in itertools.product((0.01, 0.05), (False, True)):
            rounds = [
                [took(training, batch, loader, early, reads, 2 if quick else 6) for early in (False, True)]
                for _ in range(2 if quick else 4)
            ]
            late, soon = map(statistics.median, zip(*rounds[1:], strict=True))
            how = f"{name}, {state}, a loader of {loader * 1e3:.0f} ms, losses {'' if reads else 'not '}read"
            print(f"{how}: {late:.1f} ms an iteration, with start() {soon:.1f} ({1 - soon / late:+.1%})")
        del training


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="toys")
    main(parser.parse_args().quick)
