"""load.py PORT MODEL CLIENTS REQUESTS COMMAND ...: chat requests from many clients, and COMMAND in the middle of them.

For the machine under test: only the standard library. Prints one JSON object: how many answers of which status (or
which error), the slowest answer in seconds, the command's exit status.
"""

import http.client
import json
import subprocess
import sys
import threading
import time
from collections import Counter


def ask(port: int, model: str, number: int) -> str:
    body = {"model": model, "max_tokens": 20, "messages": [{"role": "user", "content": f"Request {number}."}]}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    try:
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"})
        answer = connection.getresponse()
        text = answer.read().decode()
        return "200" if answer.status == 200 and "choices" in text else f"{answer.status} {text[:200]}"
    except OSError as error:
        return type(error).__name__
    finally:
        connection.close()


def main() -> None:
    port, model, clients, requests, command = (*sys.argv[1:5], sys.argv[5:])
    numbers, answers, slowest = iter(range(int(requests))), Counter[str](), 0.0
    changed = threading.Condition()

    def client() -> None:
        nonlocal slowest
        while True:
            with changed:
                number = next(numbers, None)
            if number is None:
                return
            started = time.monotonic()
            answer = ask(int(port), model, number)
            with changed:
                answers[answer] += 1
                slowest = max(slowest, time.monotonic() - started)
                changed.notify()

    threads = [threading.Thread(target=client) for _ in range(int(clients))]
    for thread in threads:
        thread.start()
    with changed:
        changed.wait_for(lambda: answers.total() >= int(requests) // 4)
    status = subprocess.run(command, check=False).returncode
    during = answers.total()
    for thread in threads:
        thread.join()
    json.dump(
        {"answers": answers, "slowest": slowest, "command": status, "answered when it was done": during}, sys.stdout
    )


if __name__ == "__main__":
    main()
