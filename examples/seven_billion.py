"""All 6.7 billion parameters of a model in Llama's shapes, trained with AdamW in 16 GiB of the GPU and 13 of the host.

    python examples/seven_billion.py [--small]  # 23 million parameters, on a CPU, too

State is in 8 bits and on the host (of a model on a CPU: in a file).  Each page of it is updated during the backward, as
soon as its gradients are complete, which are freed at once.
"""

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pagedopt import PagedAdamW

FULL, SMALL = (4096, 11008, 32, 32, 32000, 2048), (512, 1376, 6, 8, 4096, 32)
parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
parser.add_argument("--small", action="store_true", required=not torch.cuda.is_available())
WIDTH, INNER, LAYERS, HEADS, WORDS, TOKENS = SMALL if parser.parse_args().small else FULL


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(WIDTH, INNER, bias=False) for _ in range(2))
        self.down = nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (of(self.norm1(x)).unflatten(-1, (HEADS, -1)).transpose(1, 2) for of in (self.q, self.k, self.v))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.silu(self.gate(self.norm2(x))) * self.up(self.norm2(x)))


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(device):
        ends = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        model = nn.Sequential(nn.Embedding(WORDS, WIDTH), *(Block() for _ in range(LAYERS)), *ends)
    optimizer = PagedAdamW(model.parameters(), lr=1e-4, state_format="int8", device_budget=0)
    optimizer.attach(model, overlap="backward")
    tokens = torch.randint(WORDS, (1, TOKENS + 1), device=device)  # a text to learn by heart
    for step in range(6):
        x = tokens[:, :-1]
        for layer in model:
            x = checkpoint(layer, x, use_reentrant=False)  # the backward computes activations again
        loss = F.cross_entropy(x[0].float(), tokens[0, 1:])
        loss.backward()  # in which parameters are updated, and gradients freed
        optimizer.step()  # waits until that is done, and counts
        print(f"step {step}: loss {loss.item():.3f}")
    print(optimizer.memory_report())


if __name__ == "__main__":
    main()
