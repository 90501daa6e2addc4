import pytest, torch
from played_card import Card, CUDA
from pagedopt import PagedAdamW

SIZES = (3000, 17, 1500, 4097)

def train(device, steps=3, **options):
    g = torch.Generator().manual_seed(1)
    params = [torch.nn.Parameter(torch.randn(n, generator=g).to(device)) for n in SIZES]
    opt = PagedAdamW(params, lr=1e-2, **options)
    for _ in range(steps):
        for p in params:
            p.grad = torch.randn(p.shape, generator=g).to(device)
        opt.step()
    return [p.detach().cpu() for p in params]

def test_first(monkeypatch):
    with Card(monkeypatch).playing() as card:
        a = train(CUDA, device_budget=0)
    b = train("cpu")
    assert all(torch.equal(x,y) for x,y in zip(a,b))
