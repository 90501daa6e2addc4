"""A whole training iteration in one CUDA graph: forward, backward and step, replayed for each batch.

    python examples/captured_loop.py

Needs an NVIDIA GPU.  The learning rate is a tensor on the device, so that it may change between replays.
"""

import torch

from pagedopt import PagedAdamW

STEPS, WARM = 200, 3


def main() -> None:
    if not torch.cuda.is_available():
        print("a CUDA graph needs an NVIDIA GPU, and here is none")
        return
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64)).cuda()
    rate = torch.tensor(3e-3, device="cuda")
    optimizer = PagedAdamW(model.parameters(), lr=rate, weight_decay=0.1, capturable=True)
    batch = torch.empty(32, 64, device="cuda")  # each replay reads the batch here

    def iteration() -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = torch.nn.functional.mse_loss(model(batch), batch.flip(1))
        loss.backward()
        optimizer.step()
        return loss

    side = torch.cuda.Stream()  # torch asks for a few iterations beside the current stream before the capture
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM):
            batch.normal_()
            iteration()
    torch.cuda.current_stream().wait_stream(side)

    graph = torch.cuda.CUDAGraph()
    optimizer.zero_grad(set_to_none=True)  # gradients are then made in the graph's own memory
    with torch.cuda.graph(graph):
        loss = iteration()

    for step in range(STEPS):
        rate.fill_(3e-3 * (1 - step / STEPS))
        batch.normal_()
        graph.replay()
        if step % 50 == 0 or step == STEPS - 1:
            print(f"step {step}: loss {loss.item():.4f}")
    print(optimizer.memory_report())


if __name__ == "__main__":
    main()
