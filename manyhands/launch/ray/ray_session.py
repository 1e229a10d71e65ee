# SPDX-License-Identifier: Apache-2.0
"""Ray, started for us or reached at an address. The only module that imports it.

Without an address a private Ray is started, in a folder of its own, with a token that nobody else
has, and it ends with us. (It listens at this host's address; Ray takes no loopback.) With one,
this process becomes a driver of that cluster and must run on one of its nodes, because Ray's
drivers speak to their raylet over a local socket.

Nothing is left to what happens to lie around: address, folder and token are always given, because
a `ray_current_cluster` file or a token in somebody's home changes what a plain `ray.init()` does.
"""

import importlib
import os
import secrets
import signal
import stat
import threading
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from manyhands.launch.hosts.host_daemon import address_towards
from manyhands.values.environment import switched_on, variables
from manyhands.values.errors import RequestError
from manyhands.values.machine import usable_cores
from manyhands.values.scratch_folder import Scratch, sweep

GONE_S = 10.0
SILENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_USAGE_STATS_REPORT_URL": "http://127.0.0.1:9",  # should somebody turn them on elsewhere
    "RAY_DISABLE_DOCKER_CPU_WARNING": "1",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}
BRIEF = {"RAY_gcs_server_port_wait_time_s": "1"}  # attempts, really, each of about 40 s; else 20
SET_BY_RAY = ("PYTHONBREAKPOINT", "RAY_CLIENT_MODE")


def is_ray(engine: str) -> bool:
    return engine == "ray" or engine.startswith(("ray://", "ray="))


def address_of(engine: str) -> str | None:
    """ "ray" → None, "ray://HOST:PORT" or "ray=HOST:PORT" → HOST:PORT"""
    if engine == "ray":
        return None
    address = engine.removeprefix("ray://").removeprefix("ray=")
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdigit():
        raise RequestError(f"--engine {engine}: write it as ray, or as ray://HOST:PORT.")
    return address


class Session:
    """A connection to Ray; and Ray itself, where it was started for us."""

    def __init__(self, address: str | None, token_file: Path | None = None) -> None:
        self.held = ExitStack()
        self.folder: Path | None = None
        self.address = "127.0.0.1"
        """Of this host, as Ray's other nodes reach it."""
        self.own = address is None
        """Nobody else uses it."""
        try:
            if address is None:
                self.ray = self._start(token_file)
            else:
                self.ray = self._reach(address, token_file)
        except BaseException:
            self.held.close()
            raise

    def _start(self, token_file: Path | None) -> Any:
        if token_file is not None:
            raise RequestError("--ray-token-file is for a Ray cluster: --engine ray://HOST:PORT.")
        ray = _imported()
        if ray.is_initialized():  # by the caller, who also ends it
            self.own = False
            self.address = ray.util.get_node_ip_address()
            return ray
        sweep()
        scratch = Scratch("ray")
        self.held.callback(scratch.close)
        folder = self.folder = scratch.path
        token = folder / "token"
        with open(os.open(token, os.O_CREAT | os.O_WRONLY | os.O_EXCL, 0o600), "w") as file:
            file.write(secrets.token_hex(32))
        self._speak_with(ray, {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)})
        self.held.callback(_see_gone, str(token))
        self.held.callback(ray.shutdown)
        try:
            self._init(
                ray,
                address="local",
                num_cpus=usable_cores(),
                include_dashboard=False,
                _temp_dir=str(folder / "ray"),
                _system_config={"worker_niceness": 0},  # Ray's own choice is 15
            )
        except Exception as error:  # Ray raises many kinds
            raise RequestError(f"Ray did not start here. It said: {_last_words(error)}") from error
        self.address = ray.util.get_node_ip_address()
        return ray

    def _reach(self, address: str, token_file: Path | None) -> Any:
        ray = _imported()
        self.address = address_towards(address.rpartition(":")[0].strip("[]"))
        if ray.is_initialized():
            raise RequestError(
                "this process is connected to Ray already; use --engine ray to train over that, "
                "or ray.shutdown() first."
            )
        token: dict[str, str] = {}
        if token_file is not None:
            _check_token(token_file)
            token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token_file.absolute())}
        self._speak_with(ray, token, BRIEF)
        try:
            self._init(ray, address=address, _node_ip_address=self.address)
        except Exception as error:  # Ray raises many kinds
            tls = switched_on("RAY_USE_TLS")
            raise RequestError(_why_not_reached(address, self.address, error, tls)) from error
        self.held.callback(ray.shutdown)
        return ray

    def _speak_with(
        self, ray: Any, token: Mapping[str, str], also: Mapping[str, str] | None = None
    ) -> None:
        """Set what Ray reads from the environment, and have it read again."""
        changes: dict[str, str | None] = {**SILENT, **token, **(also or {})}
        if token:
            changes["RAY_AUTH_TOKEN"] = None  # it would be preferred to the file
        self.held.callback(_read_again, ray)
        self.held.enter_context(variables(changes, also=SET_BY_RAY))
        _read_again(ray)

    def _init(self, ray: Any, **how: Any) -> None:
        main = threading.current_thread() is threading.main_thread()
        before = signal.getsignal(signal.SIGTERM) if main else None
        try:
            ray.init(log_to_driver=False, logging_level="ERROR", **how)
            self._hush(ray)
        finally:
            if before is not None:  # Ray's would end us without a word
                signal.signal(signal.SIGTERM, before)

    def _hush(self, ray: Any) -> None:
        """Ray prints what befalls its processes on our standard output; we tell it ourselves."""
        with suppress(AttributeError):
            inside, before = ray._private.worker, ray._private.worker._worker_logs_enabled
            inside._worker_logs_enabled = False
            self.held.callback(setattr, inside, "_worker_logs_enabled", before)

    @property
    def asks_for_a_token(self) -> bool:
        with suppress(ImportError, AttributeError):
            raylet = self.ray._raylet
            return raylet.get_authentication_mode() == raylet.AuthenticationMode.TOKEN
        return False

    def close(self) -> None:
        self.held.close()


def _imported() -> Any:
    try:
        with variables({}, also=SET_BY_RAY):
            import ray

            for part in ("autoscaler.sdk", "exceptions", "util.scheduling_strategies"):
                importlib.import_module(f"ray.{part}")
    except ImportError as error:
        raise RequestError(
            f"Ray is not installed here ({error}). Install it with: pip install 'manyhands[ray]'"
        ) from error
    return ray


def _read_again(ray: Any) -> None:
    """Ray reads its settings when it is imported, and a token once."""
    with suppress(ImportError, AttributeError):
        ray._raylet.Config.initialize("")
        ray._raylet.AuthenticationTokenLoader.instance().reset_cache()


def _check_token(file: Path) -> None:
    try:
        mode = file.stat().st_mode
        empty = not file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"the Ray token file {file} cannot be read: {error}") from error
    if empty:
        raise RequestError(f"the Ray token file {file} is empty.")
    if stat.S_ISREG(mode) and mode & 0o077:
        raise RequestError(
            f"the Ray token file {file} can be read by others (mode {mode & 0o777:o}): "
            f"chmod 600 {file}"
        )


def _why_not_reached(address: str, here: str, error: Exception, tls: bool) -> str:
    text = " ".join(f"{error} {error.__cause__ or ''}".split())
    if "AuthToken" in text or "uthentication" in text:
        return (
            f"the Ray cluster at {address} asks for a token, and ours is missing or wrong. Give "
            "it: --ray-token-file FILE"
        )
    if "No node info found" in text:
        return (
            f"this host ({here}) is not a node of the Ray cluster at {address}, and a driver has "
            f"to run on one. Make it one: ray start --address {address} --num-cpus 0"
        )
    if tls:
        secure = (
            "We speak TLS (RAY_USE_TLS): does the cluster, and do RAY_TLS_CA_CERT, "
            "RAY_TLS_SERVER_CERT and RAY_TLS_SERVER_KEY name files of its CA?"
        )
    else:
        secure = "If it speaks TLS, set RAY_USE_TLS=1 and RAY_TLS_* here too."
    return (
        f"the Ray cluster at {address} cannot be reached. Is it the port of its head (6379 as a "
        f"rule, not 10001)? {secure} Ray said: {_last_words(error)}"
    )


def _last_words(error: Exception) -> str:
    """Ray puts a whole traceback into some of its messages."""
    text = " ".join(f"{error} {error.__cause__ or ''}".split())
    if "Traceback" in text:
        text = f"{error.__cause__ or error}".strip().splitlines()[-1]
    return text[-500:]


def _see_gone(token: str) -> None:
    """Wait for Ray's processes to end: all of them have our token's path in their environment."""
    deadline = time.monotonic() + GONE_S
    while ray_processes(token) and time.monotonic() < deadline:
        time.sleep(0.05)


def ray_processes(token: str) -> list[int]:
    """Processes that were started with this token's path."""
    found: list[int] = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if f"={token}\0".encode() in path.read_bytes():
                found.append(int(path.parent.name))
    return found
