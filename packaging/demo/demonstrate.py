"""What the product does, shown on the running one: a first answer, sleep, wake on request, failover.

Only the standard library, and only the outside contracts (HTTP, vllmctl, systemctl): what it shows, anybody can do.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass

#: Seconds that one request may take: a cold start of a real engine on a slow machine.
PATIENCE = 600
CLIENTS, REQUESTS = 6, 60
#: The replica is killed when this many requests have been answered.
KILL_AFTER = 15


@dataclass(frozen=True, slots=True)
class Answer:
    """One chat completion. Times are seconds from the moment at which the request was sent."""

    status: int
    text: str
    first_byte: float
    total: float


class Demonstration:
    """The endpoint and the ways to look behind it."""

    def __init__(self, port: int, inside: str, vllmctl: str) -> None:
        self.port, self.inside, self.vllmctl = port, inside, vllmctl
        listed = json.loads(self._get("/v1/models"))["data"]
        self.model = str(listed[0]["id"])

    def ask(self, content: str, *, stream: bool, show: bool = False, tokens: int = 40) -> Answer:
        """One chat completion through the port; ``show`` prints a stream as it comes."""
        body = {
            "model": self.model,
            "stream": stream,
            "max_tokens": tokens,
            "messages": [{"role": "user", "content": content}],
        }
        started = time.monotonic()
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
        try:
            connection.request("POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"})
            response = connection.getresponse()
            if not stream or response.status != 200:
                text = response.read().decode()
                elapsed = time.monotonic() - started
                return Answer(response.status, text, elapsed, elapsed)
            pieces: list[str] = []
            first_byte = 0.0
            for line in response:
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line[6:])
                piece = (event.get("choices") or [{}])[0].get("delta", {}).get("content") or event.get("error") or ""
                if piece and not first_byte:
                    first_byte = time.monotonic() - started
                pieces.append(str(piece))
                if show:
                    print(piece, end="", flush=True)
            return Answer(response.status, "".join(pieces), first_byte, time.monotonic() - started)
        finally:
            connection.close()

    def control(self, *arguments: str) -> str:
        """Run vllmctl; returns what it printed. Ends the demonstration where it fails."""
        done = subprocess.run([self.vllmctl, *arguments], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            sys.exit(f"vllmctl {' '.join(arguments)} exited with {done.returncode}: {done.stderr.strip()}")
        return done.stdout.strip()

    def replicas(self) -> list[dict[str, object]]:
        return list(json.loads(self.control("status", "--json"))["replicas"])

    def kill(self, unit: str) -> None:
        """As a crash would: SIGKILL to every process of the unit."""
        subprocess.run([self.inside, "systemctl", "--user", "kill", "--signal=KILL", unit], check=True)

    def _get(self, path: str) -> bytes:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
        try:
            connection.request("GET", path)
            return connection.getresponse().read()
        finally:
            connection.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--inside", required=True, help="the program that runs a command where the user manager is")
    parser.add_argument("--vllmctl", required=True)
    options = parser.parse_args()
    demonstration = Demonstration(options.port, options.inside, options.vllmctl)
    first_answer(demonstration, float(os.environ.get("RUN_STARTED", time.time())))
    sleep_and_wake(demonstration)
    failover(demonstration)


def headline(text: str) -> None:
    print(f"\n── {text}", flush=True)


def first_answer(demonstration: Demonstration, run_started: float) -> None:
    headline(f"A first request through http://127.0.0.1:{demonstration.port}; the engine is started for it")
    answer = demonstration.ask("Say something.", stream=True, show=True)
    print()
    expect(answer)
    print(f"   first token after {answer.first_byte:.1f} s, of which the engine's start was the most")
    print(f"   {time.time() - run_started:.1f} s since 'make run' began")
    again = demonstration.ask("And again.", stream=True)
    expect(again)
    print(f"   the next request, with the engine awake: first token after {again.first_byte * 1000:.0f} ms")
    demonstration.control("up", demonstration.model)
    headline("vllmctl status")
    print(indented(demonstration.control("status")))


def sleep_and_wake(demonstration: Demonstration) -> None:
    headline(f"Asleep: vllmctl sleep {demonstration.model}")
    started = time.monotonic()
    demonstration.control("sleep", demonstration.model, "--level", "1")
    print(f"   done and verified after {time.monotonic() - started:.1f} s")
    for replica in demonstration.replicas():
        print(f"   {replica['name']}: {replica['state']} (level {replica['sleep_level']})")
    headline("Woken by a request; nobody says so")
    answer = demonstration.ask("Good morning!", stream=True, show=True)
    print()
    expect(answer)
    print(f"   first token after {answer.first_byte:.2f} s")
    for replica in demonstration.replicas():
        wake = float(str(replica.get("wake_seconds") or 0))
        print(f"   {replica['name']}: {replica['state']}" + (f", its wake took {wake:.2f} s" if wake else ""))


def failover(demonstration: Demonstration) -> None:
    demonstration.control("up", demonstration.model)
    victim = next(replica for replica in demonstration.replicas() if replica["state"] == "ready")
    unit = str(victim["unit"])
    headline(f"Failover: {REQUESTS} requests from {CLIENTS} clients, and {unit} is killed in the middle")
    answers: list[Answer] = []
    todo, answered = iter(range(REQUESTS)), threading.Condition()

    def client() -> None:
        while True:
            with answered:
                number = next(todo, None)
            if number is None:
                return
            try:
                answer = demonstration.ask(f"Request {number}.", stream=False, tokens=20)
            except (OSError, http.client.HTTPException) as error:
                answer = Answer(0, repr(error), 0.0, 0.0)
            with answered:
                answers.append(answer)
                answered.notify()

    threads = [threading.Thread(target=client) for _ in range(CLIENTS)]
    for thread in threads:
        thread.start()
    with answered:
        answered.wait_for(lambda: len(answers) >= KILL_AFTER)
    demonstration.kill(unit)
    print(f"   killed after {KILL_AFTER} answers", flush=True)
    for thread in threads:
        thread.join()
    statuses = Counter(answer.status or "no answer" for answer in answers)
    print("   answers: " + ", ".join(f"{count} x {status}" for status, count in sorted(statuses.items(), key=str)))
    print(f"   the slowest took {max(answer.total for answer in answers):.2f} s")
    failed = [answer for answer in answers if answer.status != 200]
    if failed:
        sys.exit(f"a client saw an error: {failed[0].text}")
    print("   (Whole answers, that is. A stream that had begun there would have ended with an error event.)")
    print("   systemd starts it again by itself:")
    deadline = time.monotonic() + PATIENCE
    while True:  # a state to look for, with a limit: vllmctl has no "wait until"
        found = next(replica for replica in demonstration.replicas() if replica["name"] == victim["name"])
        if found["state"] == "ready":
            break
        if time.monotonic() > deadline:
            sys.exit(f"{victim['name']} did not come back: {found['state']} {found.get('last_error', '')}")
        time.sleep(0.5)
    print(indented(demonstration.control("status")))


def expect(answer: Answer) -> None:
    if answer.status != 200 or not answer.text:
        sys.exit(f"the request was answered with {answer.status}: {answer.text.strip()}")


def indented(text: str) -> str:
    return "\n".join(f"   {line}" for line in text.splitlines())


if __name__ == "__main__":
    main()
