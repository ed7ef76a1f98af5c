"""The plan of the arena: one piece of memory per call for temporaries and scratch.

Offsets are allocated and freed while the code is emitted, so buffers whose lifetimes
do not overlap share memory, and the size is known when the code is complete.
"""

ALIGNMENT = 64  # a cache line, and the widest vector


class Arena:
    """First-fit offsets; `size` is the peak usage."""

    def __init__(self) -> None:
        self.size = 0
        self._used: dict[int, int] = {}  # offset -> end

    def take(self, size: int) -> int:
        size = max(1, -(-size // ALIGNMENT)) * ALIGNMENT
        offset = 0
        for start, end in sorted(self._used.items()):
            if start - offset >= size:
                break
            offset = end
        self._used[offset] = offset + size
        self.size = max(self.size, offset + size)
        return offset

    def give_back(self, offset: int) -> None:
        del self._used[offset]
