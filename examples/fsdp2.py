"""FSDP2 over several processes, half of each one's optimizer state away from its device, saved; run it again to go on:
torchrun --nproc-per-node 2 examples/fsdp2.py"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from pagedopt import PagedAdamW


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--folder", type=Path, default=Path("runs/fsdp2"), help="for the checkpoint")
    options = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("start it with torchrun --nproc-per-node 2 examples/fsdp2.py")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    say = print if rank == 0 else lambda _: None
    device = torch.device("cuda", rank) if torch.cuda.device_count() >= world else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    torch.manual_seed(0)
    layers = (torch.nn.TransformerEncoderLayer(64, 4, 256, dropout=0.0, batch_first=True) for _ in range(4))
    model = torch.nn.Sequential(*layers).to(device)
    mesh = dist.device_mesh.init_device_mesh(device.type, (world,))
    for part in (*model, model):
        fully_shard(part, mesh=mesh)
    optimizer = PagedAdamW(model.parameters(), lr=1e-3, device_budget="50%")

    def everything(step: int) -> dict:
        return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True), step=step)

    begin = 0
    if options.folder.exists():  # saved by this or another number of processes
        saved = everything(begin)
        dcp.load(saved, checkpoint_id=options.folder)
        set_state_dict(model, optimizer, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"])
        begin = saved["step"]
    for step in range(begin, begin + options.steps):
        x = torch.randn(8, 16, 64, generator=torch.Generator().manual_seed(1000 * step + rank)).to(device)
        loss = (model(x) - x.roll(1, dims=1)).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step(), optimizer.zero_grad()
        say(f"step {step}: loss of this process {loss.item():.6f}")
    say(f"of this process: {optimizer.memory_report()}")
    dcp.save(everything(begin + options.steps), checkpoint_id=options.folder)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
