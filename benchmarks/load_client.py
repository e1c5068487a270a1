"""A small HTTP/1.1 client that keeps its connections: light enough that the server is what is measured."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field


@dataclass
class Tally:
    """What came back: seconds of each answer, and how many were not 200.

    At a rate also when each was due, how late the client itself sent it, and (when, seconds) of a fixed piece of work
    done in between, which tells how fast the machine was.
    """

    seconds: list[float] = field(default_factory=list)
    failed: int = 0
    due: list[float] = field(default_factory=list)
    late: list[float] = field(default_factory=list)
    paces: list[tuple[float, float]] = field(default_factory=list)


def quantile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


class Connection:
    """One connection; requests one after another."""

    def __init__(self, host: str, port: int) -> None:
        self._address = (host, port)
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def get(self, path: str) -> tuple[int, int]:
        """(status, bytes of the body)."""
        if self._writer is None:
            self._reader, self._writer = await asyncio.open_connection(*self._address)
        assert self._reader is not None
        host = "{}:{}".format(*self._address)
        self._writer.write(f"GET {path} HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
        head = await self._reader.readuntil(b"\r\n\r\n")
        low = head.lower()
        start = low.index(b"content-length:") + 15
        length = int(low[start : low.index(b"\r\n", start)])
        await self._reader.readexactly(length)
        return int(head[9:12]), length

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


async def flat_out(host: str, port: int, paths: list[str], seconds: float, width: int) -> Tally:
    """As many requests as ``width`` connections can make."""
    tally, end = Tally(), time.perf_counter() + seconds

    async def work(number: int) -> None:
        connection, turn = Connection(host, port), number
        while time.perf_counter() < end:
            begin = time.perf_counter()
            status, _ = await connection.get(paths[turn % len(paths)])
            tally.seconds.append(time.perf_counter() - begin)
            tally.failed += status != 200
            turn += 1
        connection.close()

    await asyncio.gather(*(work(number) for number in range(width)))
    return tally


async def at_rate(
    host: str, port: int, paths: list[str], seconds: float, rate: float, width: int
) -> Tally:
    """``rate`` requests a second, each timed from the moment when it was due: waiting for a connection counts."""
    tally = Tally()
    pace = asyncio.create_task(_pace(tally))
    begin = time.perf_counter()
    free: asyncio.Queue[Connection] = asyncio.Queue()
    for _ in range(width):
        free.put_nowait(Connection(host, port))

    async def one(number: int, due: float) -> None:
        tally.late.append(time.perf_counter() - due)
        connection = await free.get()
        status, _ = await connection.get(paths[number % len(paths)])
        tally.seconds.append(time.perf_counter() - due)
        tally.due.append(due)
        tally.failed += status != 200
        free.put_nowait(connection)

    tasks = []
    for number in range(int(rate * seconds)):
        due = begin + number / rate
        wait = due - time.perf_counter()
        if wait > 0:
            await asyncio.sleep(wait)
        tasks.append(asyncio.create_task(one(number, due)))
    await asyncio.gather(*tasks)
    pace.cancel()
    while not free.empty():
        free.get_nowait().close()
    return tally


async def _pace(tally: Tally) -> None:
    """Time the same piece of work again and again, a hundredth of this process's time."""
    while True:
        begin = time.perf_counter()
        sum(range(4000))
        tally.paces.append((begin, time.perf_counter() - begin))
        await asyncio.sleep(0.01)


def steady(tally: Tally, window: float = 0.5) -> tuple[list[float], int, int]:
    """(seconds of the answers due while the machine kept its pace, how many windows it kept it in, of how many).

    It did not where a pace took over twice the median: another process, or the host of a virtual machine, had the core.
    """
    usual = quantile([took for _, took in tally.paces], 0.5)
    slow = {int(when / window) for when, took in tally.paces if took > 2 * usual}
    slow |= {number + 1 for number in slow}  # what queued up then is answered in the next one
    windows = {int(due / window) for due in tally.due}
    pairs = zip(tally.due, tally.seconds, strict=True)
    kept = [seconds for due, seconds in pairs if int(due / window) not in slow]
    return kept, len(windows - slow), len(windows)
