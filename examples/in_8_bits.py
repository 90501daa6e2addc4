"""State in 8 bits, all of it away from the device, but for the state of an embedding, which is float32.

    python examples/in_8_bits.py

On one device.  Run twice: the second run goes on with the first one's checkpoint, in runs/examples.
"""

from pathlib import Path

import torch

from pagedopt import PagedAdamW

CHECKPOINT = Path("runs/examples/in_8_bits.pt")
STEPS = 50


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    layers = [torch.nn.Embedding(256, 64), torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 256)]
    model = torch.nn.Sequential(*layers).to(device)
    embedding = {"params": model[0].parameters(), "state_format": "float32"}
    others = {"params": model[1:].parameters()}
    # device_budget=0: all state is on the host (of a model on a CPU: in a file).  In 8 bits, a quarter of it moves.
    # State of the two biases is float32: they have fewer than 4,096 elements.
    optimizer = PagedAdamW([embedding, others], lr=1e-3, state_format="int8", device_budget=0)

    first = 0
    if CHECKPOINT.exists():
        saved = torch.load(CHECKPOINT, map_location="cpu", weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["step"]
        print(f"goes on at step {first}")

    generator = torch.Generator(device).manual_seed(first)
    for step in range(first, first + STEPS):
        tokens = torch.randint(256, (256,), generator=generator, device=device)
        loss = torch.nn.functional.cross_entropy(model(tokens), (7 * tokens + 3) % 256)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0:
            print(f"step {step}: loss {loss.item():.4f}")
    print(optimizer.memory_report())

    CHECKPOINT.parent.mkdir(parents=True, exist_ok=True)
    # The checkpoint has the codes of 8 bits.  decoded_state_dict() has float32, which torch.optim.AdamW loads, too.
    parts = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save({"step": first + STEPS, **parts}, CHECKPOINT)


if __name__ == "__main__":
    main()
