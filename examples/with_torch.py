"""A PyTorch module whose norm and attention are kernels, beside torch's own operators.

Both are trained from the same weights on the same data; their losses must agree.
"""

import torch

import pallasite.torch
from pallasite import kernels
from pallasite.kernels import masks

rms_norm = pallasite.torch.wrap(kernels.rms_norm)
attention = pallasite.torch.wrap(
    lambda query, key, value: kernels.attention(query, key, value, mask=masks.Causal())
)


class Block(torch.nn.Module):
    """Causal self-attention with a residual connection."""

    def __init__(self, width: int, heads: int, by_kernels: bool):
        super().__init__()
        self.heads, self.by_kernels = heads, by_kernels
        self.scale = torch.nn.Parameter(torch.ones(width))
        self.qkv = torch.nn.Linear(width, 3 * width)
        self.out = torch.nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        normed = self.normed(x)
        qkv = self.qkv(normed).reshape(batch, length, 3, self.heads, -1)
        mixed = self.mixed(*qkv.unbind(2))
        return x + self.out(mixed.reshape(batch, length, width))

    def normed(self, x: torch.Tensor) -> torch.Tensor:
        if self.by_kernels:
            return rms_norm(x, self.scale)
        return torch.nn.functional.rms_norm(x, x.shape[-1:], self.scale, eps=1e-6)

    def mixed(self, *qkv: torch.Tensor) -> torch.Tensor:
        if self.by_kernels:
            return attention(*qkv)
        query, key, value = (x.transpose(1, 2) for x in qkv)
        return torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True
        ).transpose(1, 2)


def train(by_kernels: bool, device: str) -> list[float]:
    """The loss of each of 20 steps."""
    torch.manual_seed(0)
    model = Block(64, 2, by_kernels).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    x, wanted = torch.randn(2, 4, 32, 64).to(device)
    losses: list[float] = []
    for _ in range(20):
        loss = torch.nn.functional.mse_loss(model(x), wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    own, ours = train(False, device), train(True, device)
    off = max(abs(a - b) for a, b in zip(own, ours, strict=True))
    print(f"loss {ours[0]:.3f} to {ours[-1]:.3f}, torch's own within {off:.1e}")
    assert off < 5e-3 and ours[-1] < ours[0]


if __name__ == "__main__":
    main()
