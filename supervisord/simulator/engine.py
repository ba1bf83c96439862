"""The engine core: one loop that steps the scheduler, and a queue of control calls that take their turn between steps.

What is real here: the order in which things happen and what is answered meanwhile. What is not: text and memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import TypeVar

from supervisord.simulator.cache import BlockPool, Hit
from supervisord.simulator.clock import Clock
from supervisord.simulator.counters import Counters
from supervisord.simulator.faults import Fault, Faults
from supervisord.simulator.generation import EngineDead, Generation, Output, ShutDown, Work
from supervisord.simulator.log import EngineLog
from supervisord.simulator.metrics import Metrics
from supervisord.simulator.options import Options
from supervisord.simulator.scheduler import Scheduler, Seq
from supervisord.simulator.sleep import IllegalAccess, Pause, SleepState
from supervisord.simulator.tokens import Answer, count

T = TypeVar("T")
MODES = ("abort", "wait", "keep")


class CallFailed(Exception):
    """A control call failed in the core; becomes HTTP 500."""


class Engine:
    """``on_death``: the core died (the process follows); ``on_crash``: SIGKILL yourself."""

    def __init__(
        self,
        options: Options,
        clock: Clock,
        faults: Faults,
        log: EngineLog,
        on_death: Callable[[], None],
        on_crash: Callable[[], None],
    ) -> None:
        self.options, self.faults = options, faults
        self.counters, self.metrics = Counters(), Metrics()
        self.state = SleepState(frees=options.sleep_mode)
        self.dead = False
        self.takes_requests = True
        self._clock, self._log = clock, log
        self._on_death, self._on_crash = on_death, on_crash
        blocks = max(1, options.kv_tokens // options.block_size)
        self.cache = BlockPool(blocks, options.block_size, caching=options.prefix_caching)
        self.scheduler = Scheduler(options.costs, options.max_num_seqs, options.max_num_batched_tokens, self.cache)
        self._generations: dict[Seq, Generation] = {}
        self._core = asyncio.Lock()  # held by a step or by a control call, first come first served
        self._work = asyncio.Event()
        self._changed = asyncio.Event()
        self._alive = asyncio.Event()  # cleared: hung
        self._alive.set()
        self._leaks = False  # lie-sleep=memory struck: this sleep freed nothing
        self._tasks: set[asyncio.Task[object]] = set()
        self._death = asyncio.get_running_loop().create_future()

    # --- life -----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        self.spawn(self._run())

    async def close(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def strike(self, fault: Fault) -> None:
        """Carry out die, crash or hang now."""
        self._log.info("simulator", f"fault {fault.name}")
        if fault.name == "die":
            self.die("simulated death of the engine core")
        elif fault.name == "crash":
            self._on_crash()
        else:
            self.freeze()

    def strike_at(self, moment: str) -> None:
        """Carry out the fault that waits for this moment, if there is one."""
        fault = self.faults.take_at(moment)
        if fault is not None:
            self.strike(fault)

    def unhang(self) -> None:
        self._alive.set()

    def freeze(self) -> None:
        """Stop computing and answering, as if hung."""
        self._alive.clear()
        self._changed.set()

    async def frozen(self) -> None:
        """Wait until it hangs."""
        await self.until(lambda: not self._alive.is_set())

    def die(self, reason: str) -> None:
        """The core process is gone: every request fails, every later call too."""
        if self.dead:
            return
        self.dead = True
        self._log.error(
            "core.py", f"EngineCore encountered a fatal error.\nTraceback (most recent call last):\n{reason}"
        )
        self._log.error("async_llm.py", "AsyncLLM output_handler failed.\nvllm.v1.engine.exceptions.EngineDeadError")
        for generation in self._generations.values():
            generation.outputs.put_nowait(EngineDead())
            self.metrics.success["error"] += 1
        self._generations.clear()
        self._changed.set()
        self._death.set_result(None)
        self._on_death()

    # --- requests -------------------------------------------------------------------------------------------------

    def submit(self, request_id: str, work: Work) -> Generation:
        """Queue a request; while asleep or paused it waits. Raises EngineDead, ShutDown."""
        if self.dead:
            raise EngineDead
        if not self.takes_requests:
            raise ShutDown
        answer = Answer(work.prompt, work.last_text)
        length = work.limit if work.ignore_eos else max(work.min_tokens, min(answer.length, work.limit))
        keys = self.cache.keys(work.prompt, work.salt)
        seq = Seq(count(work.prompt), min(length, work.limit), keys, self._looked_up)
        generation = Generation(request_id, work, answer, seq, keys, asyncio.get_running_loop().time())
        self._generations[seq] = generation
        self.scheduler.add(seq)
        self._work.set()
        self._changed.set()
        return generation

    def leave(self, generation: Generation) -> None:
        """The client is gone: stop computing for it. Harmless when the request had ended."""
        if self._generations.pop(generation.seq, None) is not None:
            self.scheduler.remove(generation.seq)
            self.counters.disconnect_aborts += 1
            self._log.info("async_llm.py", f"Request {generation.id} aborted.")
            self._settle()

    def abort(self, ids: Iterable[str] | None = None) -> int:
        """End requests with finish_reason ``abort`` (HTTP 200); None: all of them. Returns how many."""
        wanted = None if ids is None else set(ids)
        ended = [
            g
            for g in self._generations.values()
            if wanted is None or g.id in wanted or g.id.split("-", 1)[-1] in wanted
        ]
        for generation in ended:
            del self._generations[generation.seq]
            self.scheduler.remove(generation.seq)
            self.counters.aborted += 1
            self.metrics.success["abort"] += 1
            generation.outputs.put_nowait(Output("", "abort"))
        self._settle()
        return len(ended)

    async def empty(self) -> None:
        """Wait until no request is left, running or waiting."""
        await self.until(lambda: not self._generations)

    # --- control calls --------------------------------------------------------------------------------------------

    async def sleep(self, level: int, mode: str) -> None:
        await self._call(self._sleep(level, mode))

    async def _sleep(self, level: int, mode: str) -> None:
        async with self._turn("sleep", f"sleep?level={level}&mode={mode}"):
            if self.faults.take("sleep-fails"):
                raise CallFailed("Call to sleep method failed: simulated failure of sleep")
            lie = self.faults.take("lie-sleep")
            if lie and lie.arg != "memory":
                return
            self._pause(mode)
        if mode == "wait":
            await self.until(lambda: not self.scheduler.running)
        async with self._turn("asleep"):
            falls = level > 0 and not self.state.asleep
            if falls:
                await self._clock.sleep(self.options.times.sleep)
                self.scheduler.preempt_all()
                self.cache.clear()
                self._leaks = lie is not None
                freed = self.state.gpu_bytes(self.options.memory)["used"]
            self.state = self.state.sleep(level)
            if falls:
                freed -= self.state.gpu_bytes(self.options.memory)["used"]
                self.counters.sleeps[level] += 1
                self._log.info("gpu_worker.py", f"Sleep mode freed {freed / 1024**3:.2f} GiB memory (simulated)")
            else:
                self.counters.noop_sleeps += 1

    async def wake_up(self, tags: Sequence[str] | None) -> bool:
        """Returns whether the engine is still asleep (a partial wake)."""
        return await self._call(self._wake_up(tags))

    async def _wake_up(self, tags: Sequence[str] | None) -> bool:
        name = "all" if tags is None else "+".join(tags)
        async with self._turn("wake_up", "wake_up" if tags is None else f"wake_up?tags={name}"):
            failing = self.faults.armed("wake-fails")
            if failing and (not failing.arg or tags is None or failing.arg in tags):
                self.faults.take("wake-fails")
                where = "/workspace/csrc/cumem_allocator.cpp:163"
                raise CallFailed(f"Call to wake_up method failed: CUDA Error: out of memory at {where}")
            after = self.state.wake(tags)
            await self._clock.sleep(self.options.times.wake(self.state, self.state.asleep - after.asleep))
            self.state = after
            self._leaks = self._leaks and bool(after.asleep)
            self.counters.wakes[name] += 1
            self._work.set()
            return after.is_sleeping

    async def is_sleeping(self) -> bool:
        async def read() -> bool:
            async with self._turn():
                return self.state.is_sleeping

        return await self._call(read())

    async def reload_weights(self) -> None:
        await self._call(self._reload_weights())

    async def _reload_weights(self) -> None:
        async with self._turn("reload_weights", "reload_weights"):
            if self.faults.take("reload-fails"):
                raise CallFailed("Call to reload_weights method failed: [Errno 116] Stale file handle (simulated)")
            try:
                after = self.state.reload()
            except IllegalAccess as error:
                raise CallFailed(f"Call to reload_weights method failed: {error}") from None
            await self._clock.sleep(self.options.times.reload)
            self.state = after
            self.counters.reloads += 1

    async def reset_prefix_cache(self) -> None:
        async def reset() -> None:
            async with self._turn("reset_prefix_cache", "reset_prefix_cache"):
                self.cache.clear()
                self.counters.prefix_resets += 1

        await self._call(reset())

    async def pause(self, mode: str, clear_cache: bool) -> None:
        """As ``/pause``: ``abort`` ends requests, ``wait`` lets running ones finish, ``keep`` freezes them."""

        async def run() -> None:
            async with self._turn(call=f"pause?mode={mode}"):
                self._pause(mode)
            if mode == "wait":
                await self.until(lambda: not self.scheduler.running)
            async with self._turn():
                self.state = self.state.paused(Pause.ALL)
                if clear_cache and mode != "keep":
                    self.cache.clear()

        await self._call(run())

    async def resume(self) -> None:
        async def run() -> None:
            async with self._turn(call="resume"):
                self.state = self.state.paused(Pause.NONE)
                self._work.set()

        await self._call(run())

    def memory(self) -> dict[str, int]:
        """GPU and host bytes held now."""
        sizes = self.options.memory
        held = SleepState(frees=False) if self._leaks else self.state
        return {**held.gpu_bytes(sizes), "host_weights": self.state.host_bytes(sizes)}

    # --- the core -------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        while True:
            await self._work.wait()
            async with self._core:
                await self._alive.wait()
                self.scheduler.tainting = not self.state.whole or self.faults.armed("garbage") is not None
                step = None if self.state.pause is Pause.ALL else self.scheduler.plan(self.state.pause is Pause.NONE)
                if step is None:
                    self._work.clear()
                    self._clock.idle()
                    continue
                if not self.state.runnable:
                    self.die("RuntimeError: CUDA error: an illegal memory access was encountered")
                    return
                await self._clock.step(step.seconds)
                await self._alive.wait()
                if self.dead:
                    return
                self._deliver(self.scheduler.commit(step))
                self._settle()

    def _deliver(self, advanced: Iterable[Seq]) -> None:
        now = asyncio.get_running_loop().time()
        forced = self.faults.armed("garbage") is not None
        for seq in advanced:
            generation = self._generations.get(seq)
            if generation is None:
                continue
            garbage = forced or not self.state.whole or seq.tainted
            generation.garbage = generation.garbage or garbage
            if seq.produced <= 1:
                self.metrics.ttft.observe(now - generation.submitted)
                self.metrics.prompt_tokens += seq.prompt_tokens
            else:
                self.metrics.inter_token.observe(now - generation.last_token)
            generation.last_token = now
            output = self._advance(generation, garbage)
            generation.outputs.put_nowait(output)
            if output.finish is not None:
                self._finish(generation, output.finish, now)

    def _advance(self, generation: Generation, garbage: bool) -> Output:
        seq, work = generation.seq, generation.work
        if not seq.target:
            return Output("", "stop")
        self.metrics.generation_tokens += 1
        piece = generation.answer.token(seq.produced - 1, garbage)
        logprob = generation.answer.logprob(seq.produced - 1, garbage)
        if work.logprobs:
            generation.tokens.append((piece, logprob))
        generation.looked_at = generation.text
        whole = generation.text + piece
        for word in work.stop:
            at = whole.find(word)
            if at >= 0:
                piece = whole[len(generation.text) : max(at, len(generation.text))]
                generation.text += piece
                return Output(piece, "stop", logprob)
        generation.text = whole
        if not seq.done:
            return Output(piece, None, logprob)
        complete = not work.ignore_eos and generation.answer.length <= seq.target
        return Output(piece, "stop" if complete else "length", logprob)

    def _finish(self, generation: Generation, reason: str, now: float) -> None:
        del self._generations[generation.seq]
        self.scheduler.remove(generation.seq)
        # The last token was never looked at, so the cache does not have it.
        known = generation.work.prompt + generation.looked_at.encode()
        self.cache.store(self.cache.keys(known, generation.work.salt, generation.keys), generation.garbage)
        self.counters.finished += 1
        self.counters.garbage_answers += generation.garbage
        self.metrics.success[reason] += 1
        self.metrics.e2e.observe(now - generation.submitted)

    def _looked_up(self, seq: Seq, hit: Hit) -> None:
        if not seq.preempted:  # as vLLM counts
            self.metrics.prefix_queries += seq.prompt_tokens
            self.metrics.prefix_hits += hit.tokens
        self.metrics.preemptions = self.scheduler.preemptions

    def _pause(self, mode: str) -> None:
        if mode == "abort":
            self.abort()
        self.state = self.state.paused(Pause.NEW if mode == "wait" else Pause.ALL)
        self._work.set()

    def _settle(self) -> None:
        """After a change of the queues: refresh the gauges (not while paused: no step, no news), wake who waits."""
        if self.state.pause is not Pause.ALL:
            self.metrics.running = len(self.scheduler.running)
            self.metrics.waiting = len(self.scheduler.waiting)
            self.metrics.kv_usage = self.scheduler.kv_usage
        self._changed.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until the queues or counters satisfy ``condition``; looked at after every change of theirs."""
        while not condition():
            self._changed.clear()
            await self._changed.wait()

    @asynccontextmanager
    async def _turn(self, moment: str = "", call: str = "") -> AsyncIterator[None]:
        """A control call's turn in the core, between two steps. ``moment``: faults that wait for it strike now."""
        async with self._core:
            await self._alive.wait()
            if call:
                self.counters.calls.append(call)
                self._changed.set()
            if moment:
                self.strike_at(moment)
            await self._alive.wait()
            if self.dead:
                raise EngineDead
            yield

    async def _call(self, operation: Awaitable[T]) -> T:
        """Run a control call to its end even if the caller leaves; EngineDead if the core dies first."""
        task = self.spawn(operation)
        await asyncio.wait({task, self._death}, return_when=asyncio.FIRST_COMPLETED)
        if task.done() and not self.dead:
            return task.result()
        raise EngineDead

    def spawn(self, operation: Awaitable[T]) -> asyncio.Task[T]:
        """Run something for as long as the engine lives."""

        async def run() -> T:
            return await operation

        task = asyncio.get_running_loop().create_task(run())
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[object]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # its caller may be gone; then nobody else asks
