"""The `ray` engine: the hosts are nodes of a Ray cluster, one bundle of a placement group each, with an actor that starts the host server.

Ray reserves resources, chooses the nodes, starts the actors, and reports their ends. No data and no key of the run passes through it. When
a node dies, Ray moves its bundle to a spare one, where the next start of the host's processes finds it. Host 0 is the launcher's node.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Mapping
from math import ceil
from typing import Any

from flowrt.errors import UserError, WorkerDiedError, as_line, install_command
from flowrt.graph.model import FIRST_HOST
from flowrt.graph.settings import HostSettings
from flowrt.hosts.local_engine import start_server
from flowrt.processes.output_tail import exit_text
from flowrt.seams import Seams

STEP_SECONDS = 0.5  # between two looks whether a reservation is still wanted
SMALLEST = 0.001  # of a resource; a bundle needs some
_INSECURE = "Ray has no token authentication here, so anyone who reaches its ports may run code"
_REMEDY = "set RAY_AUTH_MODE=token on every host (docs/hosts.md), or write hosts.insecure: true"


class HostActor:
    """Runs in a Ray worker process of the host. The stdin of the host server ends with this process."""

    def describe(self) -> tuple[str, bool]:
        """The id of the node, and whether it demands tokens."""
        import ray

        return ray.get_runtime_context().get_node_id(), _demands_tokens()

    def start(self, line: bytes) -> bytes:
        """Start the host server. Returns the line that it replies."""
        self._server = start_server(line)
        assert self._server.stdout is not None
        return self._server.stdout.readline()

    def wait(self) -> str:
        """How the host server has ended."""
        return exit_text(self._server.wait())


class RayHostProcess:
    """See flowrt.system.host_engine.HostProcess."""

    def __init__(self, ray: Any, name: str, actor: Any, address: str) -> None:
        self._ray, self._name, self._actor, self.address = ray, name, actor, address

    async def start(self, line: bytes) -> bytes:
        try:
            reply: bytes = await self._actor.start.remote(line)
        except self._ray.exceptions.RayError as error:
            raise WorkerDiedError(self._name, f"cannot start: {_first_line(error)}") from None
        return reply

    async def wait(self) -> str:
        try:
            how: str = await self._actor.wait.remote()
        except self._ray.exceptions.RayError as error:
            return f"has ended: {_first_line(error)}"
        return how

    def kill(self) -> None:
        self._ray.kill(self._actor)


class RayEngine:
    """See flowrt.system.host_engine.HostEngine."""

    def __init__(self, ray: Any, group: Any, bundles: Mapping[str, int], is_insecure: bool, owns_connection: bool) -> None:
        self._ray, self._group, self._bundles = ray, group, bundles
        self._is_insecure, self._owns_connection = is_insecure, owns_connection
        self._is_closed = False
        self.address = self._address_of(ray.get_runtime_context().get_node_id())

    @classmethod
    async def open(cls, settings: HostSettings, resources: Mapping[str, Mapping[str, float]], seams: Seams, seconds: float) -> RayEngine:
        """Join the cluster and reserve the `resources` of each host. Raises UserError."""
        try:
            import ray
        except ImportError:
            raise UserError(f"hosts.engine is ray, which is not installed: {install_command('ray')}") from None
        if not (settings.insecure or _demands_tokens()):
            raise UserError(f"{_INSECURE}; {_REMEDY}")
        compute, own, opened = seams.new_compute("ray"), asyncio.current_task(), list[RayEngine]()
        assert own is not None
        before = own.cancelling()

        def open_engine() -> RayEngine:
            opened.append(cls._open(ray, settings, resources, seconds, lambda: own.cancelling() > before))
            return opened[0]

        try:
            return await compute.run("ray", open_engine, bound_seconds=2 * seconds)
        except asyncio.CancelledError:  # once the thread has ended
            for engine in opened:
                engine.kill_all()
            raise
        finally:
            await compute.aclose()

    @classmethod
    def _open(
        cls, ray: Any, settings: HostSettings, resources: Mapping[str, Mapping[str, float]], seconds: float, is_left: Callable[[], bool]
    ) -> RayEngine:
        """`is_left`: whether the caller has been cancelled."""
        owns_connection = not ray.is_initialized()
        if owns_connection:
            try:
                ray.init(address=settings.address, log_to_driver=False, logging_level=logging.ERROR)
            except Exception as error:  # ConnectionError, RuntimeError, AuthenticationError: Ray has no common type
                text = f"there is no Ray cluster to join at {settings.address!r} ({_first_line(error)})"
                raise UserError(f"{text}; start one with ray start --head here, and ray start --address=.. on the other hosts") from None
        engine, group = None, None
        try:
            names, here = list(resources), _node(ray, ray.get_runtime_context().get_node_id())["NodeManagerAddress"]
            bundles = [dict(resources[name]) or {"CPU": SMALLEST} for name in names]
            bundles[names.index(FIRST_HOST)][f"node:{here}"] = SMALLEST
            group = ray.util.placement_group(bundles, strategy="STRICT_SPREAD")
            step = min(STEP_SECONDS, seconds)
            if not any(group.wait(step) or is_left() for _ in range(ceil(seconds / step))) or is_left():
                wanted = "; ".join(f"{name}: {dict(resources[name])}" for name in names)
                text = f"Ray has no {len(names)} hosts with these resources free within {seconds:g} s ({wanted})"
                raise UserError(f"{text}; start more Ray nodes, or lower resources in place:")
            engine = cls(ray, group, {name: index for index, name in enumerate(names)}, settings.insecure, owns_connection)
            return engine
        finally:
            if engine is None:
                _leave(ray, group, owns_connection)

    async def open_host(self, name: str) -> RayHostProcess:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        ray, bundle = self._ray, self._bundles[name]
        where = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=bundle)
        gpus = self._group.bundle_specs[bundle].get("GPU", 0)
        actor = ray.remote(HostActor).options(num_cpus=0, num_gpus=gpus, max_concurrency=2, scheduling_strategy=where).remote()
        try:
            node, is_secure = await actor.describe.remote()
            if not (is_secure or self._is_insecure):
                raise UserError(f"{name}: {_INSECURE}; {_REMEDY}")
            return RayHostProcess(ray, name, actor, self._address_of(node))
        except ray.exceptions.RayError as error:
            raise WorkerDiedError(name, f"cannot start: {_first_line(error)}") from None
        except BaseException:
            ray.kill(actor)
            raise

    async def aclose(self) -> None:
        self.kill_all()

    def kill_all(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            _leave(self._ray, self._group, self._owns_connection)

    def _address_of(self, node: str) -> str:
        address: str = _node(self._ray, node)["NodeManagerAddress"]
        return address


def _node(ray: Any, node: str) -> Mapping[str, Any]:
    found: Mapping[str, Any] = next(each for each in ray.nodes() if each["NodeID"] == node)
    return found


def _leave(ray: Any, group: Any, owns_connection: bool) -> None:
    """Give back the reserved resources, with which the actors end."""
    if group is not None:
        ray.util.remove_placement_group(group)
    if owns_connection:
        ray.shutdown()


def _demands_tokens() -> bool:
    return os.environ.get("RAY_AUTH_MODE", "").lower() == "token"


def _first_line(error: BaseException) -> str:
    return as_line(str(error).strip().partition("\n")[0])
