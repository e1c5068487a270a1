"""What candidates need before they can run: a schedule's proof, the model's time, a compiled kernel; each found once.

The work is done by the compile processes, in the order in which candidates need it, ahead of and beside the timing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from dash_kernels.problem import SHARED_MEMORY_LIMIT
from tuner.compile import kernel_identity
from tuner.engines.local import Pool
from tuner.plan import Item, SweepSettings
from tuner.worker import Reply

Key = tuple[str, str]


class Preparation:
    """Hands proofs, predictions and compiles to ``compilers``; ``sms`` is the chip's, None until it is known."""

    def __init__(self, settings: SweepSettings, compilers: Pool, items: Sequence[Item]) -> None:
        self.settings, self.compilers = settings, compilers
        self.items = list(items)
        self.sms: int | None = settings.sms or None
        self.done: dict[Key, Reply] = {}
        self._begun: set[Key] = set()
        self._handed = 0
        self._compiles: deque[tuple[Key, Item]] = deque()
        self._proofs: deque[tuple[Key, Item]] = deque()
        self._predictions: deque[tuple[Key, Item]] = deque()
        self._queue()

    def keep(self, items: Sequence[Item]) -> None:
        """Go on with these items only: the others have rows, and what only they needed is dropped."""
        self.items = list(items)
        wanted = {item.kernel_key for item in self.items}
        self._begun -= {key for key, _ in self._compiles if key[1] not in wanted}
        self._compiles = deque(task for task in self._compiles if task[0][1] in wanted)
        self._queue()

    def clear(self) -> None:
        """Begin nothing more."""
        for queue in (self._compiles, self._proofs, self._predictions):
            queue.clear()

    def _queue(self) -> None:
        """Proofs and predictions in the order in which candidates need them, each once."""
        needed: dict[Key, Item] = {}
        for item in self.items:
            if item.candidate.runnable and item.state == "waiting":
                needed.setdefault(("prove", item.prove_key), item)
                if self.settings.model:
                    needed.setdefault(("predict", item.predict_key), item)
        left = [(key, item) for key, item in needed.items() if key not in self._begun]
        self._proofs = deque(task for task in left if task[0][0] == "prove")
        self._predictions = deque(task for task in left if task[0][0] == "predict")

    def hand_out(self) -> None:
        """Compiles first, then proofs, then predictions; one process in four begins with predictions.

        Where nothing is timed a row needs its prediction too: every second task is one, so that any budget gives rows.
        """
        usual = self._compiles, self._proofs, self._predictions
        for slot in self.compilers.idle_slots():
            if self.settings.source == "compiled":
                predicts = self._handed % 2 == 1
            else:
                predicts = self.compilers.slots.index(slot) % 4 == 3
            found = self._next((self._predictions, *usual) if predicts else usual)
            if found is None:
                break
            key, item = found
            self._handed += 1
            self._begun.add(key)
            task = {
                "kind": key[0],
                "problem": item.problem.to_dict(),
                "config": item.config.to_dict(),
                "cooperative": self.residents(item) > 1,
            }
            self.compilers.submit(slot, key, task, self.settings.compile_timeout_s)

    def _next(self, queues: Sequence[deque[tuple[Key, Item]]]) -> tuple[Key, Item] | None:
        """What a waiting candidate needs next; what only candidates in other hands need is passed over."""
        for queue in queues:
            while queue:
                key, item = queue.popleft()
                if item.state == "waiting" or self._is_needed(key):
                    return key, item
                self._begun.discard(key)
        return None

    def _is_needed(self, key: Key) -> bool:
        needs = {"prove": "prove_key", "predict": "predict_key", "compile": "kernel_key"}[key[0]]
        return any(getattr(item, needs) == key[1] for item in self.items if item.state == "waiting")

    def again(self, items: Sequence[Item]) -> None:
        """These candidates wait again: prepare what was passed over while they were in other hands."""
        self._queue()
        self._want_kernels(item for item in items if (proof := self.proof(item)) and proof.ok)

    def collect(self) -> None:
        """Keep what the compile processes have found; a proof names the kernels that its candidates need next."""
        for _, key, reply in self.compilers.poll():
            self.done[key] = reply
            if key[0] == "prove" and reply.ok:
                self._want_kernels(item for item in self.items if item.prove_key == key[1])

    def _want_kernels(self, proven: Iterable[Item]) -> None:
        for item in proven:
            if item.state != "waiting" or self.misfit(item):
                continue
            item.kernel_key = kernel_identity(
                item.problem, item.config, cooperative=self.residents(item) > 1
            )
            key = ("compile", item.kernel_key)
            if key not in self._begun:
                self._begun.add(key)
                self._compiles.append((key, item))

    # -- what is known of an item -----------------------------------------------------------------------------------

    def proof(self, item: Item) -> Reply | None:
        return self.done.get(("prove", item.prove_key))

    def kernel(self, item: Item) -> Reply | None:
        return self.done.get(("compile", item.kernel_key))

    def prediction(self, item: Item) -> Reply | None:
        return self.done.get(("predict", item.predict_key))

    def predicted_ms(self, item: Item) -> float:
        """The model's time; infinity where the model has not answered."""
        reply = self.prediction(item)
        return float(reply.result["predicted"]) if reply is not None and reply.ok else float("inf")

    def residents(self, item: Item) -> int:
        """CTAs that must be resident at once, 1 before the proof has said so."""
        proof = self.proof(item)
        if proof is None or not proof.ok or item.config.policy != "ordered":
            return 1
        return int(proof.result["min_resident"])

    def ready(self, item: Item) -> bool:
        """Proven, compiled, and within what this chip has."""
        proof, kernel = self.proof(item), self.kernel(item)
        return bool(proof and kernel and proof.ok and kernel.ok and not self.misfit(item))

    def misfit(self, item: Item) -> tuple[str, dict[str, int]] | None:
        """Why a proven or compiled candidate does not fit this chip, and the bytes where memory is it."""
        residents, kernel = self.residents(item), self.kernel(item)
        if self.sms is not None and residents > self.sms:
            chip = f"{self.settings.gpu} has {self.sms} SMs"
            return f"needs {residents} CTAs resident at once; {chip}", {}
        limit = SHARED_MEMORY_LIMIT.get(self.settings.capability)
        shared = kernel.result.get("shared_bytes") if kernel is not None and kernel.ok else None
        if limit is None or shared is None or shared <= limit:
            return None
        needed = {"required_bytes": int(shared), "limit_bytes": limit}
        return f"the kernel takes {shared} bytes of shared memory; the limit is {limit}", needed
