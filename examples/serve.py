"""Serves the model of `train.py`: continuous batching over a paged cache.

Every step takes up to `budget` tokens: one of each sequence that is generating, and as
much of waiting prompts as there is room for. `ragged_paged_attention` handles both in
one call, so that one compiled step serves all. Sequences come and go at any step; their
pages are handed out when they are needed and taken back at the end.

    python examples/serve.py                 # a toy, in seconds
    python examples/serve.py --size real
"""

import argparse
import collections
import dataclasses
import functools
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import train

from pallasite import kernels


@dataclasses.dataclass(frozen=True)
class Size:
    """A model, and how it is served; lengths are the longest ones."""

    model: train.Model
    requests: int
    prompts: int
    answers: int
    sequences: int
    budget: int
    page: int


SIZES = {
    "toy": Size(
        train.Model(64, 1, 4, 2, 128, dtype=jnp.float32),
        *(40, 400, 24),
        *(8, 64, 16),
    ),
    "real": Size(
        train.Model(1024, 8, 16, 4, 3072),
        *(400, 512, 128),
        *(64, 256, 16),
    ),
}


@dataclasses.dataclass
class Request:
    """A prompt, and what was generated for it so far.

    Attributes:
        prompt: tokens.
        answer: how many tokens to generate.
        generated: those that are.
        pages: of the cache, in order.
        cached: how many tokens have their keys in the cache.
    """

    prompt: list[int]
    answer: int
    generated: list[int] = dataclasses.field(default_factory=list[int])
    pages: list[int] = dataclasses.field(default_factory=list[int])
    cached: int = 0

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.generated

    @property
    def is_done(self) -> bool:
        return len(self.generated) == self.answer


@functools.partial(
    jax.jit,
    static_argnames=("model", "implementation"),
    donate_argnames=("key_pages", "value_pages"),
)
def step(
    params: train.Params,
    key_pages: list[jax.Array],
    value_pages: list[jax.Array],
    batch: Any,
    *,
    model: train.Model,
    implementation: train.Implementation,
):
    """The next token of each sequence, and the pages with the new keys and values.

    Args:
        key_pages, value_pages: one array of pages per layer.
        batch: int32 arrays: `tokens`, `positions` and `slots` of the budget's tokens
            (slot -1: padding), `lengths`, `query_lengths` and `page_table` of the
            sequences.
    """
    key_pages, value_pages = list(key_pages), list(value_pages)

    def attend(layer: int, query: jax.Array, key: jax.Array, value: jax.Array):
        key_pages[layer], value_pages[layer] = (
            kernels.update_pages(
                pages, new[0], batch["slots"], implementation=implementation
            )
            for pages, new in (
                (key_pages[layer], key),
                (value_pages[layer], value),
            )
        )
        return kernels.ragged_paged_attention(
            query[0],
            key_pages[layer],
            value_pages[layer],
            batch["lengths"],
            batch["page_table"],
            batch["query_lengths"],
            implementation=implementation,
        )[None]

    tokens, positions = batch["tokens"][None], batch["positions"][None]
    x = train.hidden_states(params, tokens, positions, attend, model, implementation)
    last = jnp.maximum(jnp.cumsum(batch["query_lengths"]) - 1, 0)
    logits = x[0][last] @ params["head"].astype(model.dtype)
    return jnp.argmax(logits, axis=-1), key_pages, value_pages


class Server:
    """A model with its cache and the requests it works on.

    Args:
        params, model: of `train.py`.
        sequences: how many are in work at a time.
        budget: tokens of a step.
        page: tokens of a page.
        longest: tokens of the longest request, prompt and answer.
        implementation: "pallasite" or "xla".
    """

    def __init__(
        self,
        params: train.Params,
        model: train.Model,
        *,
        sequences: int,
        budget: int,
        page: int,
        longest: int,
        implementation: train.Implementation = "pallasite",
    ):
        self.params, self.model = params, model
        self.implementation: train.Implementation = implementation
        self.sequences, self.budget, self.page = sequences, budget, page
        self.width = -(-longest // page)  # pages of the longest sequence
        count = sequences * self.width
        shape = (count, page, model.kv_heads, model.head_width)
        self.key_pages = [jnp.zeros(shape, model.dtype) for _ in range(model.layers)]
        self.value_pages = [jnp.zeros(shape, model.dtype) for _ in range(model.layers)]
        self.free = list(range(count))
        self.running: list[Request] = []
        self.started = 0.0
        self.progress: list[tuple[float, float]] = []  # seconds, tokens so far

    def serve(self, requests: list[Request]) -> None:
        """Generates the answers of all requests."""
        waiting = collections.deque(requests)
        self.started = time.perf_counter()
        while waiting or self.running:
            while waiting and len(self.running) < self.sequences:
                self.running.append(waiting.popleft())
            self._step()

    def _step(self) -> None:
        # Sequences that generate first, so that prompts never hold them up.
        order = sorted(self.running, key=lambda r: len(r.tokens) - r.cached)
        new: list[int] = []
        for request in order:
            room = self.budget - sum(new)
            new.append(min(len(request.tokens) - request.cached, room))
        batch = self._batch(order, new)
        chosen, self.key_pages, self.value_pages = step(
            self.params,
            self.key_pages,
            self.value_pages,
            batch,
            model=self.model,
            implementation=self.implementation,
        )
        done = 0
        for request, count, token in zip(order, new, np.asarray(chosen), strict=False):
            request.cached += count
            if count and request.cached == len(request.tokens):
                request.generated.append(int(token))
                done += 1
            if request.is_done:
                self.free += request.pages
                request.pages = []
        self.running = [request for request in self.running if not request.is_done]
        before = self.progress[-1][1] if self.progress else 0
        self.progress.append((time.perf_counter() - self.started, before + done))

    def _batch(self, order: list[Request], new: list[int]) -> dict[str, np.ndarray]:
        tokens, positions = np.zeros((2, self.budget), np.int32)
        slots = np.full(self.budget, -1, np.int32)
        lengths, query_lengths = np.zeros((2, self.sequences), np.int32)
        table = np.zeros((self.sequences, self.width), np.int32)
        start = 0
        for row, (request, count) in enumerate(zip(order, new, strict=True)):
            end = request.cached + count
            while len(request.pages) * self.page < end:
                request.pages.append(self.free.pop())
            places = np.arange(request.cached, end)
            pages = np.array(request.pages, np.int32)
            span = slice(start, start + count)
            tokens[span] = request.tokens[request.cached : end]
            positions[span] = places
            slots[span] = pages[places // self.page] * self.page + places % self.page
            lengths[row], query_lengths[row] = end, count
            table[row, : len(pages)] = pages
            start += count
        return {
            "tokens": tokens,
            "positions": positions,
            "slots": slots,
            "lengths": lengths,
            "query_lengths": query_lengths,
            "page_table": table,
        }


def made_requests(count: int, prompts: int, answers: int) -> list[Request]:
    """Prompts of random lengths with random bytes."""
    generator = np.random.default_rng(0)
    return [
        Request(
            generator.integers(0, 256, generator.integers(1, prompts + 1)).tolist(),
            int(generator.integers(1, answers + 1)),
        )
        for _ in range(count)
    ]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--size", choices=SIZES, default="toy")
    parser.add_argument(
        "--picture",
        type=Path,
        default=Path(tempfile.gettempdir(), "pallasite_serve.svg"),
    )
    parser.add_argument("--check", type=int, default=4, help="requests to compare")
    options = parser.parse_args(argv)
    size = SIZES[options.size]
    model, count = size.model, size.requests
    server = functools.partial(
        Server,
        train.init(model, jax.random.key(0)),
        model,
        sequences=size.sequences,
        budget=size.budget,
        page=size.page,
        longest=size.prompts + size.answers,
    )
    answered: dict[str, list[Request]] = {}
    curves: dict[str, list[tuple[float, float]]] = {}
    runs: dict[str, train.Implementation] = {"kernels": "pallasite", "plain jnp": "xla"}
    for implementation in runs.values():  # compiled here
        server(implementation=implementation).serve(made_requests(2, size.prompts, 2))
    for name, implementation in [*runs.items()] * 2:  # in turns; the better one counts
        served = server(implementation=implementation)
        answered[name] = made_requests(count, size.prompts, size.answers)
        served.serve(answered[name])
        assert sorted(served.free) == list(range(len(served.free))), "pages were lost"
        if name not in curves or served.progress[-1] < curves[name][-1]:
            curves[name] = served.progress
    rows = [
        [
            name,
            f"{len(curve)}",
            f"{1e3 * curve[-1][0] / len(curve):.1f} ms",
            f"{curve[-1][1] / curve[-1][0]:,.0f}",
            f"{curves['plain jnp'][-1][0] / curve[-1][0]:.2f}",
        ]
        for name, curve in curves.items()
    ]
    head = [f"{count} requests", "steps", "a step", "tokens per second"]
    print(train.table([*head, "times plain jnp"], rows))
    train.plot(options.picture, curves, "seconds", "tokens generated")
    alone = server()
    chosen = answered["kernels"][:: max(count // max(options.check, 1), 1)]
    chosen = chosen[: max(options.check, 0)]
    for request in chosen:
        again = Request(request.prompt, request.answer)
        alone.serve([again])
        assert again.generated == request.generated, "a batch changed an answer"
    print(f"{len(chosen)} requests give the same answers one by one")
    if model.dtype == jnp.float32:  # where rounding does not choose the token
        pairs = zip(answered["kernels"], answered["plain jnp"], strict=True)
        same = [a.generated == b.generated for a, b in pairs]
        assert np.mean(same) > 0.95, f"{np.mean(same):.0%} of the answers agree"


if __name__ == "__main__":
    main()
