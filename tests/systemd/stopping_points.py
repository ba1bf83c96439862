"""The real daemon, made to go no further at one step of one replica, so that a kill strikes exactly there.

    stopping_points.py FOLDER [the daemon's own options]

`FOLDER/plan.json` names the steps: ``{"REPLICA": ["before" | "after", "STEP"]}``. When a replica comes to its step,
nothing more is done for it, nor is anything heard of it: to the world this daemon died right there. Replicas are
independent of each other, and so one kill strikes as many of them as are in the plan, each at its own point. Under the
name `*` are the daemon's own steps: at such a one it stands still as a whole. A step that comes up twice in what is
done has a number from the second time on (`verify 2`), counted from when its plan was first read.

`FOLDER/done` gets one line per step that was begun, `FOLDER/stopped` the names of those that stand still; what they had
begun before has come to its end by then. Without a plan nothing is changed, and what is done is written down.
"""

import contextvars
import json
import signal
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from supervisord import app
from supervisord.core.actions import (
    CallEngine,
    Persist,
    ProbeEngine,
    ReadLastLines,
    RunUnitJob,
    SaveFingerprint,
    TakeFingerprint,
)
from supervisord.core.events import Configured
from supervisord.core.states import Hold
from supervisord.effects import Effects
from supervisord.loop import Dispatcher
from supervisord.sd.manager import SystemdManager
from supervisord.sd.notify import Notifier

DAEMON = "*"
#: A look goes on all the time and changes nothing, so it is no step but where it ends a sequence.
_LOOK = "look"
#: The replica and step that the running task is about.
_DOING: contextvars.ContextVar[tuple[str, str]] = contextvars.ContextVar("doing")


def words(action) -> str:
    """A step in the words of the plan."""
    match action:
        case RunUnitJob():
            return f"{action.verb} the unit"
        case CallEngine():
            return f"{action.call} {','.join(action.tags) or action.level or ''}".rstrip()
        case ProbeEngine():
            return "verify" if action.verify else _LOOK
        case Persist(record=None):
            return "remove the record"
        case Persist(record=record):
            held = "" if record.hold is Hold.NONE else f", held {record.hold}"
            return f"record {record.phase} {record.level}{held}"
        case TakeFingerprint():
            return "canary"
        case SaveFingerprint():
            return "keep the fingerprint"
        case ReadLastLines():
            return "read its last lines"
    raise TypeError(f"a step without words: {action!r}")


class Points:
    """The plan, and how far everybody has come."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._plan: dict[str, list[str]] = {}
        self._plan_read = 0
        self._times: Counter[tuple[str, str]] = Counter()
        self._stopped: set[str] = set()
        self._under_way: Counter[str] = Counter()

    def begins(self, who: str, step: str) -> str:
        """What ``ends`` is to be told of this step; nothing: it is not to be done."""
        self._look_at_plan()
        if who in self._stopped:
            return ""
        times = self._times[who, step] = self._times[who, step] + 1
        named = step if times < 2 else f"{step} {times}"
        if self._plan.get(who) == ["before", named]:
            self._stop(who)
            return ""
        self._under_way[who] += 1
        if step == _LOOK:
            return step
        with (self._folder / "done").open("a") as file:
            file.write(f"{who}: {named}\n")
        return f"{self._plan_read} {named}"

    def ends(self, who: str, named: str) -> bool:
        """The step is done; False: nobody is to hear of it. What was begun under an older plan is no step of this."""
        if named == f"{self._plan_read} {self._plan.get(who, ['', ''])[1]}" and self._plan[who][0] == "after":
            self._stop(who)
        return who not in self._stopped

    def over(self, who: str) -> None:
        """Whatever the step began has come to its end."""
        self._under_way[who] -= 1
        self._tell(who)

    def _look_at_plan(self) -> None:
        """A new plan begins a new count."""
        file = self._folder / "plan.json"
        read = file.stat().st_mtime_ns if file.exists() else 0
        if read != self._plan_read:
            self._plan_read = read
            self._plan = json.loads(file.read_text()) if read else {}
            self._times.clear()

    def _stop(self, who: str) -> None:
        self._stopped.add(who)
        if who == DAEMON:
            self._under_way[who] = 0
        self._tell(who)

    def _tell(self, who: str) -> None:
        if who in self._stopped and not self._under_way[who]:
            with (self._folder / "stopped").open("a") as file:
                file.write(f"{who}\n")
        if who == DAEMON and who in self._stopped:
            while True:
                signal.pause()

    def own(self, step: str, work: Callable):
        """Do a step of the daemon itself."""
        named = self.begins(DAEMON, step)
        value = work()
        self.ends(DAEMON, named)
        self.over(DAEMON)
        return value


def install(points: Points) -> None:
    """Every way from the daemon's decisions into the world leads past the points from now on."""

    class StoppingEffects(Effects):
        def report_to(self, dispatch):
            def heard(event):
                if points.ends(*_DOING.get()):
                    dispatch(event)

            super().report_to(heard)

        def perform(self, action):
            if named := points.begins(action.replica, words(action)):
                _DOING.set((action.replica, named))
                super().perform(action)

        def _spawn(self, work, replica=""):
            if work.__qualname__ == "Effects._retire":
                return super()._spawn(work)  # the close of an engine's client

            async def through():
                try:
                    await work
                    points.ends(*_DOING.get())  # also where nobody waits for it
                finally:
                    points.over(_DOING.get()[0])

            return super()._spawn(through(), replica)

    class StoppingDispatcher(Dispatcher):
        def dispatch(self, event):
            if isinstance(event, Configured):
                points.own("take the configuration", lambda: super(StoppingDispatcher, self).dispatch(event))
            else:
                super().dispatch(event)

    class StoppingManager(SystemdManager):
        def watch(self, units, on_change):
            points.own("watch the units", lambda: super(StoppingManager, self).watch(units, on_change))

    class StoppingNotifier(Notifier):
        def reloading(self):
            points.own("say that it reloads", super().reloading)

        def ready(self, status=""):
            points.own("say that it is ready", lambda: super(StoppingNotifier, self).ready(status))

    class StoppingProxy(app.PublicProxy):
        def reconfigure(self, config, models):
            points.own("tell the proxy", lambda: super(StoppingProxy, self).reconfigure(config, models))

    class StoppingCredentials(app.CredentialKeeper):
        def read(self, config):
            return points.own("read the keys", lambda: super(StoppingCredentials, self).read(config))

        def take(self, credentials):
            return points.own("take the keys", lambda: super(StoppingCredentials, self).take(credentials))

    read = app.load
    app.Effects, app.Dispatcher, app.SystemdManager = StoppingEffects, StoppingDispatcher, StoppingManager
    app.Notifier, app.PublicProxy, app.CredentialKeeper = StoppingNotifier, StoppingProxy, StoppingCredentials
    app.load = lambda *args, **options: points.own("read the files", lambda: read(*args, **options))


if __name__ == "__main__":
    install(Points(Path(sys.argv[1])))
    sys.exit(app.main(sys.argv[2:]))
