"""Continuous batching with chunked prefill, first come first served, as vLLM does it. Pure: no clock, no I/O.

``plan`` says what the next engine step does and how long it takes; ``commit`` books it and names the sequences that
got a token. Every step shares one budget of tokens. A sequence holds blocks of the KV cache for what it has computed;
when there are none for a running one, the one that came last gives up its own and computes again later (preemption).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from supervisord.simulator.cache import BlockPool, Blocks, Hit


@dataclass(frozen=True, slots=True)
class CostModel:
    """Simulated seconds of one step.

    Measured on a deployment of two cards: prefill 2800 tokens/s a card, TPOT p50 23.6 ms alone and 28.8 ms with eight
    requests over both cards, that is four in a batch. A straight line through both: ``step_base + step_per_seq * n``.
    """

    prefill_rate: float = 2800.0
    step_base: float = 0.02187
    step_per_seq: float = 0.00173
    #: Seconds for every pair of a new token and one that it looks at: what makes a long context slower.
    per_pair: float = 0.0
    #: Seconds of every step that computes prompts, however few tokens.
    prefill_base: float = 0.0

    def seconds(self, prefill_tokens: int, decodes: int, pairs: float = 0.0) -> float:
        decode = self.step_base + self.step_per_seq * decodes if decodes else 0.0
        prefill = self.prefill_base + prefill_tokens / self.prefill_rate if prefill_tokens else 0.0
        return decode + prefill + pairs * self.per_pair


def _ignore(seq: Seq, hit: Hit) -> None:
    pass


@dataclass(eq=False, slots=True)
class Seq:
    """One request in the engine. Identity, not value, tells sequences apart."""

    prompt_tokens: int
    #: Tokens to produce; 0 for pooling (done when the prompt is computed).
    target: int
    #: One per full block of the prompt, and of what is known of the answer.
    keys: Sequence[int] = ()
    #: Told what the cache has, each time the sequence is admitted.
    on_hit: Callable[[Seq, Hit], None] = _ignore
    #: The first token of it that is there was computed by weights that were not whole.
    tainted: bool = False
    #: It gave up its blocks at least once.
    preempted: bool = False
    #: Prompt tokens that were found when it was first admitted.
    cached: int = 0
    computed: int = 0
    produced: int = 0
    blocks: Blocks = field(default_factory=Blocks)

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
    """``max_seqs``: running at once; ``token_budget``: tokens per step; ``pool``: the KV cache."""

    def __init__(self, costs: CostModel, max_seqs: int, token_budget: int, pool: BlockPool) -> None:
        self._costs = costs
        self._max_seqs = max_seqs
        self._budget = token_budget
        self.pool = pool
        self.waiting: deque[Seq] = deque()
        self.running: list[Seq] = []
        #: How often a sequence gave up its blocks for another.
        self.preemptions = 0
        #: What is computed now is garbage, and so is what builds on it.
        self.tainting = False

    @property
    def kv_usage(self) -> float:
        """Share of the KV cache that running sequences hold, 0 to 1."""
        return min(1.0, self.pool.in_use / self.pool.capacity)

    def add(self, seq: Seq) -> None:
        self.waiting.append(seq)

    def remove(self, seq: Seq) -> bool:
        """Forget a sequence wherever it is; False if it is not here (any more)."""
        if seq in self.running:
            self.running.remove(seq)
        elif seq in self.waiting:
            self.waiting.remove(seq)
        else:
            return False
        self.pool.free(seq.blocks)
        return True

    def preempt_all(self) -> None:
        """Running sequences lose their KV and wait again, in front, in their order."""
        while self.running:
            self._preempt(self.running[-1])

    def plan(self, admit: bool = True) -> Step | None:
        """The next step, or None when nothing can run. Running ones come first, in the order of admission."""
        budget, pairs, before = self._budget, 0.0, self.preemptions
        prefill: list[tuple[Seq, int]] = []
        decode: list[Seq] = []
        at = 0
        while at < len(self.running) and budget > 0:
            seq = self.running[at]
            tokens = min(budget, max(1, seq.to_compute))
            if not self._hold(seq, seq.computed + tokens):
                break  # it was the last, and gave up itself
            if seq.prefilled:
                decode.append(seq)
            else:
                prefill.append((seq, tokens))
                pairs += tokens * (seq.computed + tokens / 2)
            budget -= tokens
            at += 1
        while (
            admit and self.waiting and budget > 0 and len(self.running) < self._max_seqs and before == self.preemptions
        ):
            seq = self.waiting[0]
            tokens = self._start(seq, budget)
            if not tokens:
                break
            prefill.append((seq, tokens))
            pairs += tokens * (seq.computed + tokens / 2)
            budget -= tokens
        if not decode and not prefill:
            return None
        return Step(self._costs.seconds(sum(n for _, n in prefill), len(decode), pairs), tuple(prefill), tuple(decode))

    def commit(self, step: Step) -> list[Seq]:
        """Book a step that was computed; returns the sequences that advanced by a token (or, pooling, are done)."""
        advanced, here = [], set(self.running)  # some may have been aborted while the step ran
        for seq, chunk in step.prefill:
            if seq in here:
                seq.computed += chunk
                if seq.to_compute == 0:
                    seq.produced += 1 if seq.target else 0
                    advanced.append(seq)
        for seq in step.decode:
            if seq in here:
                seq.computed += 1
                seq.produced += 1
                advanced.append(seq)
        for seq in advanced:
            if seq.done:
                self.running.remove(seq)
                # What of the answer is known by key is there too.
                self.pool.fill(seq.blocks, seq.keys, seq.computed, seq.tainted)
                self.pool.free(seq.blocks)
        return advanced

    def _start(self, seq: Seq, budget: int) -> int:
        """Admit the first that waits; returns the tokens that it computes in this step, 0 where it does not fit."""
        total = seq.prompt_tokens + seq.produced
        # All of it must fit now, although only this step's part is taken: what would soon have to go does not begin.
        if self.running and not self.pool.has_room(seq.keys, total):
            return 0
        blocks, hit = self.pool.take(seq.keys, total)
        tokens = min(budget, max(1, total - hit.tokens))
        self.pool.grow(blocks, hit.tokens + tokens, force=True)
        self.waiting.popleft()
        seq.blocks, seq.computed = blocks, hit.tokens
        if not seq.preempted:
            seq.cached = hit.tokens
        seq.tainted = seq.tainted or hit.tainted
        seq.on_hit(seq, hit)
        self.running.append(seq)
        self._fill(seq, seq.computed + tokens)
        return tokens

    def _hold(self, seq: Seq, tokens: int) -> bool:
        """Blocks for what a running sequence computes now, taken from those that came last; False if it had to go."""
        while not self.pool.grow(seq.blocks, tokens, force=len(self.running) == 1):
            last = self.running[-1]
            self._preempt(last)
            self.preemptions += 1
            if last is seq:
                return False
        self._fill(seq, tokens)
        return True

    def _fill(self, seq: Seq, tokens: int) -> None:
        seq.tainted = seq.tainted or self.tainting
        self.pool.fill(seq.blocks, seq.keys, min(tokens, seq.prompt_tokens), seq.tainted)

    def _preempt(self, seq: Seq) -> None:
        self.running.remove(seq)
        self.pool.free(seq.blocks)
        seq.computed = 0
        seq.preempted = True
        self.waiting.appendleft(seq)
