"""What LMDeploy's engines do around a migration, where they would give wrong answers, lose memory, or end.

In force where the role is Prefill or Decode and the migration backend is ours. Promises:
- Prefill: a prompt's blocks stay as they are from its first token until the decode engine has them, or for `migration_hold_s`. LMDeploy
  makes them evictable when the response is sent, before anybody has read them.
- A hold has a number that no other has ever had, sent with the block ids (as the last one, negative) and given back to free the blocks.
  LMDeploy asks for the API's number of the session, which is another one, or none.
- Decode: what was read counts only when the prefill engine has confirmed afterwards that it still held the blocks. So blocks that were
  freed, an engine that was restarted and an address that now belongs to another cost a prefill and never a wrong answer.
- A migration that fails, whatever the reason, costs its request a local prefill and nothing else. In LMDeploy it ends the engine's
  migration for good. Migrations run beside each other, and beside everything else.
- The memory that a migration writes is not given to anybody before the last native call has ended, also when its request is aborted.
- A link that is made anew replaces the old one. LMDeploy would listen on both.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import secrets
import time
from collections import Counter
from types import ModuleType
from typing import Any

from ...connectors.migration import MigrationError
from .. import MIGRATION_BACKEND, compat, metrics
from .backend import settings

logger = logging.getLogger("mooncake_kv.lmdeploy")

# For the prefill engine's word that it held the blocks to the end.
CONFIRM_S = 2.0
SEND_S = 1.0
LOG_S = 10.0
# A hold's number is none that LMDeploy counts for a session.
_NUMBER_BITS = 61
# Prompts by what became of them: migrated and local (decode engine), not_fetched (prefill engine).
RESULTS: Counter[str] = Counter()
_logged: Counter[str] = Counter()
_logged_at: dict[str, float] = {}


def chosen(engine: Any) -> bool:
    """Whether an LMDeploy Engine migrates with our backend."""
    config = engine.engine_config
    return config.role.name != "Hybrid" and config.migration_backend.name == MIGRATION_BACKEND


def log_rarely(what: str, message: str, *arguments: object) -> None:
    _logged[what] += 1
    now = time.monotonic()
    if now - _logged_at.get(what, -LOG_S) >= LOG_S:
        _logged_at[what] = now
        logger.warning(f"migration: {message} (%d since the last such line)", *arguments, _logged.pop(what))


class Holds:
    """Of a prefill engine: numbers of holds, each for one session."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._sessions: dict[int, int] = {}

    @classmethod
    def of(cls, engine: Any) -> Holds:
        if not hasattr(engine, "mooncake_holds"):
            engine.mooncake_holds = cls(engine)
        return engine.mooncake_holds

    def begin(self, session: int) -> int:
        number = 1 << _NUMBER_BITS | secrets.randbits(_NUMBER_BITS)
        self._sessions[number] = session
        asyncio.get_running_loop().call_later(settings().migration_hold_s, self._expire, number)
        return number

    def covers(self, session: int) -> bool:
        return session in self._sessions.values()

    def end(self, number: int) -> int:
        """The session of a hold that has begun and not ended; other numbers as they are."""
        return self._sessions.pop(number, number)

    def _expire(self, number: int) -> None:
        if number in self._sessions and self._engine.end_session(number):
            RESULTS["not_fetched"] += 1
            log_rarely("expired", "no decode engine fetched a prompt within %.0f s", settings().migration_hold_s)


def mend_engine(module: ModuleType) -> None:
    """After `lmdeploy.pytorch.engine.engine`."""
    if not compat.mends(compat.MIGRATION_ENGINE):
        return
    engine: Any = module.Engine
    end_session, on_end_session, schedule_metrics = engine.end_session, engine._on_end_session, engine.get_schedule_metrics

    @functools.wraps(end_session)
    def ours_end_session(self: Any, session_id: int) -> bool:
        return end_session(self, Holds.of(self).end(session_id) if chosen(self) else session_id)

    @functools.wraps(on_end_session)
    def ours_on_end_session(self: Any, reqs: list[Any], **kwargs: Any) -> None:
        ending = []
        for req in reqs:
            session = self.scheduler.get_session(req.data["session_id"]) if chosen(self) else None
            sequences = list(session.sequences.values()) if session is not None else []
            held = bool(sequences) and sequences[0].status.name == "TO_BE_MIGRATED" and Holds.of(self).covers(req.data["session_id"])
            if not held:
                for sequence in sequences:
                    sequence.preserve_cache = False  # ended before there was anything to migrate
                ending.append(req)
            elif req.data.get("response", True):
                self._response(req.resp, module.ResponseType.SUCCESS)
        on_end_session(self, ending, **kwargs)

    @functools.wraps(schedule_metrics)
    def ours_schedule_metrics(self: Any) -> Any:
        found = schedule_metrics(self)
        if chosen(self):
            counts = {f"{metrics.MIGRATIONS}_{result}": n for result, n in RESULTS.items()}
            setattr(found, metrics.MIGRATIONS, (f"migrations of {os.getpid()}", counts))
        return found

    engine.end_session, engine._on_end_session, engine.get_schedule_metrics = ours_end_session, ours_on_end_session, ours_schedule_metrics


def mend_loop(module: ModuleType) -> None:
    """After `lmdeploy.pytorch.engine.engine_loop`."""
    if not compat.mends(compat.MIGRATION_LOOP):
        return
    loop: Any = module.EngineLoop
    send, process, drain = loop._send_resp, loop._migration_loop_process_ready, loop.drain_for_sleep

    @functools.wraps(send)
    def ours_send(self: Any, out: Any) -> None:
        if self.config.role.name == "Prefill" and out.finish and out.cache_block_ids is not None and chosen(self.engine_conn.engine):
            out.cache_block_ids = [*out.cache_block_ids, -Holds.of(self.engine_conn.engine).begin(out.session_id)]
        send(self, out)

    @functools.wraps(process)
    async def ours_process(self: Any, migration_ready: list[Any]) -> None:
        if not chosen(self.engine_conn.engine):
            await process(self, migration_ready)
            return
        tasks = vars(self).setdefault("mooncake_migrations", set())
        for sequence in migration_ready:
            task = asyncio.create_task(_migrate(self, sequence), name="MooncakeMigration")
            tasks.add(task)
            task.add_done_callback(tasks.discard)

    @functools.wraps(drain)
    async def ours_drain(self: Any) -> None:
        await drain(self)
        await asyncio.gather(*vars(self).get("mooncake_migrations", ()), return_exceptions=True)

    loop._send_resp, loop._migration_loop_process_ready, loop.drain_for_sleep = ours_send, ours_process, ours_drain


async def _migrate(loop: Any, sequence: Any) -> None:
    """One sequence in state MIGRATION_READY, with blocks of its own."""
    try:
        await _fetch(loop, sequence)
        failure = None
    except Exception as error:
        failure = error
    if sequence.status.name != "MIGRATION_READY":  # stopped or ended meanwhile
        return
    if failure is None:
        RESULTS["migrated"] += 1
        with loop.scheduler.seqs_migration_activation([sequence]):
            await loop._migration_loop_get_outputs([sequence])
    else:
        RESULTS["local"] += 1
        log_rarely("failed", "a prompt is computed here instead: %s: %s", type(failure).__name__, failure)
        sequence.migration_request = None
        sequence.state.release_paging_resources()
        sequence.state.to_state(_waiting_state())
    loop.has_runable_event.set()


def _waiting_state() -> Any:
    from lmdeploy.pytorch.paging.seq_states.states import WaitingState

    return WaitingState


async def _fetch(loop: Any, sequence: Any) -> None:
    """Raises whatever went wrong. Afterwards the prefill engine holds nothing for this sequence, if it can be told."""
    from lmdeploy.pytorch.disagg.messages import MigrationExecutionBatch

    request = sequence.migration_request
    if request.is_dummy_prefill:
        return
    blocks = list(request.remote_block_ids)
    if not blocks or blocks[-1] >= 0:
        raise MigrationError("the prefill engine does not run with mooncake-kv's migration")
    number = -blocks.pop()
    confirmed = False
    try:
        sampling = sequence.sampling_param
        if sampling.max_new_tokens <= 1 or request.remote_token_id in sampling.stop_words:
            raise MigrationError("its first token is the last, which LMDeploy does not notice after a migration")
        here = loop.scheduler.get_block_tables([sequence])[0].tolist()
        if len(here) != len(blocks):
            raise MigrationError(f"{len(blocks)} blocks there and {len(here)} here")
        batch = MigrationExecutionBatch(
            protocol=request.protocol, requests=[(request.remote_engine_id, list(zip(blocks, here, strict=True)))]
        )
        await _execute(loop, sequence, batch)
        confirmed = True
        if not await _free(loop.engine_conn, request.remote_engine_id, number):
            raise MigrationError("the prefill engine does not confirm that it held the blocks")
    finally:
        if not confirmed:
            with contextlib.suppress(Exception):
                await _send(loop.engine_conn, request.remote_engine_id, _free_message(request.remote_engine_id, number))


async def _execute(loop: Any, sequence: Any, batch: Any) -> None:
    manager = loop.scheduler.block_manager
    pinned = sequence.logical_blocks.get_real_blocks().copy()
    manager.pin_logical_blocks(pinned)
    call = asyncio.ensure_future(loop.executor.migrate(batch))
    call.add_done_callback(lambda _: manager.release_logical_blocks(pinned))
    # The backend has the same deadline. Reads without staging may take longer to end.
    timeout_s = settings().migration_timeout_ms / 1000 + 0.5
    if not (await asyncio.wait({call}, timeout=timeout_s))[0]:
        call.add_done_callback(lambda call: call.cancelled() or call.exception())
        raise MigrationError(f"not done within {timeout_s:.1f} s")
    call.result()


def _free_message(remote_engine_id: str, number: int) -> dict[str, Any]:
    """As LMDeploy has it."""
    return {"remote_engine_id": remote_engine_id, "remote_session_id": number}


async def _send(connection: Any, remote_engine_id: str, message: dict[str, Any]) -> None:
    async with asyncio.timeout(SEND_S):
        await connection.p2p_sender[remote_engine_id].send_json(message)


async def _free(connection: Any, remote_engine_id: str, number: int) -> bool:
    """Frees a hold. Whether it was in force until now."""
    waiting = vars(connection).setdefault("mooncake_waiting", {})
    answer = waiting[number] = asyncio.get_running_loop().create_future()
    try:
        async with asyncio.timeout(CONFIRM_S):
            await _send(connection, remote_engine_id, _free_message(remote_engine_id, number))
            return await answer
    finally:
        del waiting[number]


def mend_connection(module: ModuleType) -> None:
    """After `lmdeploy.pytorch.disagg.conn.engine_conn`."""
    if not compat.mends(compat.MIGRATION_CONNECTION):
        return
    connection: Any = module.EngineP2PConnection
    initialize, receive, disconnect = connection.p2p_initialize, connection.handle_zmq_recv, connection.zmq_disconnect

    @functools.wraps(disconnect)
    def ours_disconnect(self: Any, remote_engine_id: str) -> None:
        if not chosen(self.engine):
            disconnect(self, remote_engine_id)
            return
        for task in vars(self).get("mooncake_receiving", {}).pop(remote_engine_id, ()):
            task.cancel()
        for sockets in (self.p2p_receiver, self.p2p_sender):
            if (socket := sockets.pop(remote_engine_id, None)) is not None:
                socket.close(linger=0)
        if (context := self.p2p_conn_ctx.pop(remote_engine_id, None)) is not None:
            context.term()

    @functools.wraps(initialize)
    def ours_initialize(self: Any, init_request: Any) -> Any:
        if chosen(self.engine):
            ours_disconnect(self, init_request.remote_engine_id)
        return initialize(self, init_request)

    @functools.wraps(receive)
    async def ours_receive(self: Any, remote_engine_id: str) -> None:
        if not chosen(self.engine):
            await receive(self, remote_engine_id)
            return
        task = asyncio.current_task()
        vars(self).setdefault("mooncake_receiving", {}).setdefault(remote_engine_id, []).append(task)
        receiver = self.p2p_receiver[remote_engine_id]
        while not receiver.closed:
            try:
                message = await receiver.recv_json()
            except ValueError:
                continue
            match message:
                case {"remote_session_id": int(number)}:
                    freed = number >> _NUMBER_BITS == 1 and self.engine.end_session(number)
                    with contextlib.suppress(Exception):
                        await _send(self, remote_engine_id, {"freed": number, "held": freed})
                case {"freed": int(number), "held": bool(held)}:
                    answer = vars(self).get("mooncake_waiting", {}).get(number)
                    if answer is not None and not answer.done():
                        answer.set_result(held)

    connection.p2p_initialize, connection.handle_zmq_recv, connection.zmq_disconnect = ours_initialize, ours_receive, ours_disconnect
