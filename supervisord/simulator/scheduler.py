"""Continuous batching with chunked prefill, first come first served. Pure: no clock, no I/O.

``plan`` says what the next engine step does and how long it takes; ``commit`` books it and names the sequences that
got a token. This is the seam for scheduling fidelity: KV is counted by prompt and produced tokens; what vLLM does when
it runs out (preemption) is not simulated.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class CostModel:
    """Simulated seconds of one step.

    Measured on a deployment of two cards: prefill 2800 tokens/s a card, TPOT p50 23.6 ms alone and 28.8 ms with eight
    requests over both cards, that is four in a batch. A straight line through both: ``step_base + step_per_seq * n``.
    """

    prefill_rate: float = 2800.0
    step_base: float = 0.02187
    step_per_seq: float = 0.00173

    def seconds(self, prefill_tokens: int, decodes: int) -> float:
        decode = self.step_base + self.step_per_seq * decodes if decodes else 0.0
        return decode + prefill_tokens / self.prefill_rate


@dataclass(eq=False, slots=True)
class Seq:
    """One request in the engine. Identity, not value, tells sequences apart."""

    prompt_tokens: int
    #: Tokens to produce; 0 for pooling (done when the prompt is computed).
    target: int
    #: Called once, when the sequence is admitted: how many prompt tokens the prefix cache holds.
    lookup: Callable[[], int] = field(default=lambda: 0)
    cached: int = 0
    computed: int = 0
    produced: int = 0

    @property
    def to_compute(self) -> int:
        """Tokens whose KV is missing before the next token can come: the prompt, after a preemption the output too."""
        return max(0, self.prompt_tokens + self.produced - self.computed)

    @property
    def prefilled(self) -> bool:
        return self.produced > 0 and self.to_compute <= 1

    @property
    def done(self) -> bool:
        return self.produced >= self.target and (self.produced > 0 or self.to_compute == 0)


@dataclass(frozen=True, slots=True)
class Step:
    """One step: which sequences compute how many prompt tokens, and which decode one."""

    seconds: float
    prefill: tuple[tuple[Seq, int], ...]
    decode: tuple[Seq, ...]


class Scheduler:
    """``max_seqs``: running at once; ``token_budget``: tokens per step; ``kv_tokens``: what the KV cache holds."""

    def __init__(self, costs: CostModel, max_seqs: int, token_budget: int, kv_tokens: int) -> None:
        self._costs = costs
        self._max_seqs = max_seqs
        self._budget = token_budget
        self._kv_tokens = kv_tokens
        self.waiting: deque[Seq] = deque()
        self.running: list[Seq] = []

    @property
    def kv_used(self) -> int:
        return sum(seq.prompt_tokens + seq.produced for seq in self.running)

    @property
    def kv_usage(self) -> float:
        """Share of the KV cache that running sequences hold, 0 to 1."""
        return min(1.0, self.kv_used / self._kv_tokens)

    def add(self, seq: Seq) -> None:
        self.waiting.append(seq)

    def remove(self, seq: Seq) -> bool:
        """Forget a sequence wherever it is; False if it is not here (any more)."""
        for place in (self.running, self.waiting):
            if seq in place:
                place.remove(seq)
                return True
        return False

    def preempt_all(self) -> None:
        """Running sequences lose their KV and wait again, in front, in their order."""
        for seq in reversed(self.running):
            seq.computed = seq.cached = 0
            self.waiting.appendleft(seq)
        self.running.clear()

    def plan(self, admit: bool = True) -> Step | None:
        """The next step, or None when nothing can run. Decodes come first; prompts share the rest of the budget."""
        if admit:
            self._admit()
        decode = tuple(seq for seq in self.running if seq.prefilled)
        budget = max(0, self._budget - len(decode))
        prefill: list[tuple[Seq, int]] = []
        for seq in self.running:
            if budget <= 0:
                break
            if not seq.prefilled:
                chunk = min(budget, seq.to_compute)
                prefill.append((seq, chunk))
                budget -= chunk
        if not decode and not prefill:
            return None
        return Step(self._costs.seconds(sum(n for _, n in prefill), len(decode)), tuple(prefill), decode)

    def commit(self, step: Step) -> list[Seq]:
        """Book a step that was computed; returns the sequences that advanced by a token (or, pooling, are done)."""
        advanced, here = [], set(self.running)  # some may have been aborted while the step ran
        for seq, chunk in step.prefill:
            seq.computed += chunk
            if seq in here and seq.to_compute == 0:
                seq.produced += 1 if seq.target else 0
                advanced.append(seq)
        for seq in step.decode:
            if seq in here:
                seq.computed += 1
                seq.produced += 1
                advanced.append(seq)
        self.running = [seq for seq in self.running if not seq.done]
        return advanced

    def _admit(self) -> None:
        while self.waiting and len(self.running) < self._max_seqs:
            seq = self.waiting[0]
            if self.running and self.kv_used + seq.prompt_tokens + seq.produced > self._kv_tokens:
                return
            self.waiting.popleft()
            # At least one token is always computed.
            seq.cached = min(seq.lookup(), max(0, seq.prompt_tokens - 1))
            seq.computed = seq.cached
            self.running.append(seq)
