"""The daemon, put together: its start and its stop, top to bottom.

Everything is made here, handed what it needs, and ended in the opposite order. Nothing below knows this module.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import cast

from proxy.server import PublicProxy
from supervisord import __version__
from supervisord.bus.address import NoSessionBus, session_bus_address, system_bus_address
from supervisord.bus.errors import BusError
from supervisord.bus.objects import ManagerFacts
from supervisord.bus.service import BusService
from supervisord.config.load import default_files, files_beside, load, runtime_directory
from supervisord.config.problems import ConfigError
from supervisord.core.events import ShutDown
from supervisord.core.spec import Config
from supervisord.credentials import CredentialKeeper
from supervisord.effects import Effects, replicas_of
from supervisord.engine.inspect import ProcessInspector
from supervisord.fleet_events import FleetEvents
from supervisord.heap import keep_freed_memory
from supervisord.heartbeat import Heartbeat
from supervisord.launcher.started import read_all
from supervisord.listeners import SOCKET_UNIT, STATUS_FD_NAME, ListenFailed, address_of, listening
from supervisord.loop import Dispatcher
from supervisord.monitoring.port import StatusPort
from supervisord.operate import Operator
from supervisord.ports import UnitError
from supervisord.reload import Reloader, engine_for
from supervisord.sd.journal import set_up_logging
from supervisord.sd.listen import ListenError, take_sockets
from supervisord.sd.manager import SystemdManager
from supervisord.sd.notify import Notifier, watchdog_interval
from supervisord.statedir import StateDir, StateError

log = logging.getLogger(__name__)

#: EX_CONFIG of sysexits.h: a person must put something right; the unit does not try again (RestartPreventExitStatus=).
EXIT_CONFIG = 78
#: Something that may be there the next time: the bus, the port, systemd.
EXIT_UNAVAILABLE = 69

_CONFIG_ERRORS = (ConfigError, StateError)
_UNAVAILABLE = (UnitError, BusError, NoSessionBus, ListenError, ListenFailed)


def main(argv: Sequence[str] | None = None) -> int:
    """``vllm-supervisord``."""
    options = _parser().parse_args(argv)
    set_up_logging(getattr(logging, options.log_level.upper()), os.environ)
    keep_freed_memory()
    notifier = Notifier()
    try:
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            return runner.run(serve(options, notifier))
    except (*_CONFIG_ERRORS, *_UNAVAILABLE) as error:
        log.error("cannot start: %s", error)
        notifier.status(f"cannot start: {error}")
        return EXIT_CONFIG if isinstance(error, _CONFIG_ERRORS) else EXIT_UNAVAILABLE
    finally:
        notifier.close()


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's, which halves the relay's time outside Python; asyncio's where there is no uvloop for the platform."""
    try:
        import uvloop
    except ImportError:
        return None
    return cast(Callable[[], asyncio.AbstractEventLoop], uvloop.new_event_loop)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="vllm-supervisord",
        description="One endpoint for the vLLM replicas of one machine: supervised by systemd, asleep when idle,"
        " awake on request. Control it with vllmctl or busctl.",
        epilog="Exit status: 0 stopped as asked; 69 the bus, systemd or the port is not available;"
        " 78 the configuration or the state directory must be put right first.",
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="the main configuration file (config.d beside it)")
    parser.add_argument(
        "--state-dir", type=Path, metavar="DIR", help="default: $STATE_DIRECTORY, else in XDG_STATE_HOME"
    )
    parser.add_argument("--system", action="store_true", help="the machine's systemd and bus instead of the user's")
    parser.add_argument("--log-level", choices=["debug", "info", "warning", "error"], default="info")
    parser.add_argument("--version", action="version", version=f"vllm-supervisord {__version__}")
    return parser


async def serve(options: argparse.Namespace, notifier: Notifier) -> int:
    """Run until SIGTERM or SIGINT. Raises what ``main`` turns into an exit status."""
    loop = asyncio.get_running_loop()

    runtime_dir = runtime_directory(os.environ, options.system)

    def read_config() -> Config:
        files = files_beside(options.config) if options.config else default_files(os.environ, system=options.system)
        return load(files, runtime_dir=runtime_dir, system=options.system)

    async with AsyncExitStack() as stack:
        # What a person may have got wrong comes first, before anything is touched.
        config = read_config()
        credentials = CredentialKeeper(os.environ)
        credentials.take(credentials.read(config))
        handed_over = take_sockets(os.environ, os.getpid())
        for sock in (sock for named in handed_over.values() for sock in named):
            stack.callback(sock.close)
        state = StateDir.open(options.state_dir or _state_directory())
        stack.callback(state.close)

        # The parts, from the outside in.
        manager = SystemdManager(system=options.system)
        await manager.open()
        stack.push_async_callback(manager.close)
        inspector = ProcessInspector(manager)
        effects = Effects(manager, state, engine_for, inspector, inspector)
        stack.push_async_callback(effects.close)
        events = FleetEvents()
        dispatcher = Dispatcher(effects.perform, events.note)
        stack.callback(dispatcher.close)
        effects.report_to(dispatcher.dispatch)

        heartbeat = Heartbeat(notifier, dispatcher, watchdog_interval(os.environ, os.getpid()))
        stack.callback(heartbeat.stop)
        reloader = Reloader(config, read_config, dispatcher, effects, manager, notifier, credentials)

        # Who only watches may look from here on.
        listen: tuple[str, ...] = ()

        def facts() -> ManagerFacts:
            now = reloader.config
            simulated = any(m.serve is not None and m.serve.engine == "simulator" for m in now.models)
            return ManagerFacts(__version__, listen, now.files, str(state.path), simulated)

        status = StatusPort(dispatcher.view, facts, events)
        stack.push_async_callback(status.close)
        await status.open(handed_over.get(STATUS_FD_NAME, ()), config)
        reloader.also.append(status.reconfigure)

        # The first reconciliation: running engines are adopted as they are, before anybody is let in.
        reloader.begin(state.load(), state.load_fingerprints(replicas_of(config.models)), read_all(runtime_dir))
        heartbeat.start()
        await heartbeat.while_starting(reloader.adopted())

        # The port accepts ...
        operator = Operator(dispatcher, reloader.reload, lambda model, route, body: proxy.explain(model, route, body))
        operator.subscribe_failovers(events.failed_over)
        proxy = PublicProxy(dispatcher, config.proxy, config.models, operator.failed_over)
        proxy.guard(credentials.now)
        credentials.changed.append(proxy.guard)
        stack.push_async_callback(proxy.stop)
        reloader.reconfigured.append(lambda new: proxy.reconfigure(new.proxy, new.models))
        (port_unit,) = await manager.status([SOCKET_UNIT])
        held = port_unit.active_state == "active"
        sockets = listening(handed_over, config.proxy.listen, socket_unit_active=held)
        listen = tuple(address_of(sock) for sock in sockets)
        await proxy.start(sockets)
        status.feed(proxy)

        # ... and the bus name is ours.
        address = system_bus_address(os.environ) if options.system else session_bus_address(os.environ)
        bus = BusService(operator, facts, address)
        await bus.start()
        stack.push_async_callback(bus.stop)

        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        loop.add_signal_handler(signal.SIGHUP, reloader.reload_soon)
        stack.callback(reloader.cancel)
        renewals = asyncio.create_task(credentials.watch_certificate(lambda: reloader.config.proxy))
        stack.callback(renewals.cancel)
        log.info("vllm-supervisord %s accepts requests on %s", __version__, ", ".join(listen))
        heartbeat.ready()
        await stop.wait()

        # The stop: admission closes first, then streams end by themselves, as long as they may.
        log.info("shutting down: %d requests in flight", proxy.in_flight)
        notifier.stopping("shutting down")
        await proxy.stop_accepting()
        dispatcher.dispatch(ShutDown())
        await heartbeat.while_stopping(proxy.drain(reloader.config.supervisor.drain_timeout))
    return 0


def _state_directory() -> Path:
    """Where systemd says, else where the XDG base directory specification says."""
    given = os.environ.get("STATE_DIRECTORY", "").split(":")[0]
    if given:
        return Path(given)
    base = os.environ.get("XDG_STATE_HOME", "")
    home = Path(base) if Path(base).is_absolute() else Path.home() / ".local" / "state"
    return home / "vllm-supervisord"


if __name__ == "__main__":
    sys.exit(main())
