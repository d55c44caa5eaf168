"""The writer: one process per node that outlives its ranks and stores what they filled into the slots.

It never imports torch, so that no interpreter lock, CUDA context or gigabyte of libraries is shared with training.
Everything it waits for is bounded: what hangs is reported as stalled, and given up after `commit_timeout`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from everstep.checkpoint.errors import CheckpointError, CheckpointRankLost, NoSlot
from everstep.checkpoint.format.keys import Attempt, Key
from everstep.checkpoint.peers.peer_server import PeerServer
from everstep.checkpoint.peers.replica_sender import Copier
from everstep.checkpoint.publish import attempts
from everstep.checkpoint.slots import slot_files
from everstep.checkpoint.slots.directory_lock import lock_directory
from everstep.checkpoint.slots.slots import Claim, Slot, Slots, SlotState
from everstep.checkpoint.slots.surplus_slots import move_surplus_away
from everstep.checkpoint.store.base import open_store
from everstep.checkpoint.writer import control
from everstep.checkpoint.writer.control import WriterConfig
from everstep.checkpoint.writer.control_socket import ControlSocket
from everstep.checkpoint.writer.filling_saves import Filling
from everstep.checkpoint.writer.idle_verifier import IdleVerifier
from everstep.checkpoint.writer.keeper import Keeper
from everstep.checkpoint.writer.membership import LEFT_EARLY, Member, Membership
from everstep.checkpoint.writer.save_ends import SaveEnds
from everstep.checkpoint.writer.slot_choice import choose_slot, will_be_free
from everstep.checkpoint.writer.slot_memory import SlotMemory, is_other_run
from everstep.checkpoint.writer.steps_ahead import drop_steps_ahead
from everstep.checkpoint.writer.storing import Storing

_log = logging.getLogger("everstep.checkpoint.writer")

_NICE = 5
_SHORTEST_LOOK = 0.05  # seconds between two looks whether it is time to end


class Writer:
    """The state of one node's saves. Everything but what runs in threads happens in one event loop."""

    def __init__(self, directory: Path, linger: float, has_directory: Callable[[], bool] = lambda: True) -> None:
        """`has_directory`: whether what is at this path is still the directory that this process has locked."""
        self._slots = Slots(directory)
        self._linger = linger
        self._has_directory = has_directory
        self._socket = ControlSocket(directory, self._accept)
        self._membership = Membership()
        self._filling: Filling[asyncio.StreamWriter] = Filling()
        self._verifier = IdleVerifier(directory)
        self._peers = PeerServer(directory)
        self._memory = SlotMemory(self._slots, self._peers.copies)
        self._copier = Copier(self._copied)
        self._keeper = Keeper(self._slots, self._copier.offer)
        self._ended = asyncio.Event()
        self._changed = asyncio.Event()  # it may be time to end
        self._storing = Storing(self._slots, self._keeper, self._report, self._changed.set)
        self._ends = SaveEnds()
        self._idle_since = time.monotonic()
        self._told_to_end = False

    async def serve(self) -> None:
        """Until the ranks are gone for good and nothing is left to do."""
        self._loop = asyncio.get_running_loop()
        await self._socket.open()
        watch = asyncio.create_task(self._watch())
        await self._ended.wait()
        watch.cancel()
        self._socket.close()

    def tell_to_end(self) -> None:
        """Finish what is filled and leave: nobody will come any more."""
        self._told_to_end = True
        self._changed.set()

    # ---- the ranks

    @property
    def _config(self) -> WriterConfig | None:
        return self._membership.config

    @property
    def _ranks(self) -> dict[asyncio.StreamWriter, Member]:
        return self._membership.connected

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if control.peer_of(writer.get_extra_info("socket"))[1] != os.geteuid():
            writer.close()
            return
        try:
            while line := await reader.readline():
                said = json.loads(line)
                try:
                    answer = {"id": said["id"], "ok": await self._verb(writer, said)}
                except CheckpointError as error:
                    answer = {"id": said["id"], "error": str(error)}
                except ConnectionError:
                    raise
                except Exception as error:  # whatever it is: the rank waits for the reason, and goes on
                    _log.exception("%s", said["verb"])
                    answer = {"id": said["id"], "error": f"{type(error).__name__}: {error}"}
                writer.write(json.dumps(answer).encode() + b"\n")
                await writer.drain()
        except (ConnectionError, ValueError) as error:
            _log.info("a rank's connection ended: %s", error)
        finally:
            self._lose(writer)
            writer.close()

    async def _verb(self, writer: asyncio.StreamWriter, said: dict[str, Any]) -> Any:
        self._membership.introduce(writer, said.get("process", ""))
        if said["verb"] == "hello":
            return await self._hello(writer, said)
        if said["verb"] == "occupants":  # for who only reads, and takes part in nothing
            attempt = None if self._config is None else self._config.attempt
            pids = self._membership.list_pids(beside=writer)
            return {"attempt": attempt, "pids": pids, "is_summing": self._is_summing()}
        rank = self._ranks.get(writer)
        if rank is None or self._config is None:
            raise CheckpointError("say hello first")
        if not self._membership.is_of_run(rank.run):
            raise CheckpointError(f"attempt {self._config.attempt} has taken over this node from {rank.run.attempt}")
        if "key" in said and str(Key.parse(said["key"]).attempt) != self._config.attempt:
            raise CheckpointError(
                f"{said['key']} is not of attempt {self._config.attempt}, which this rank takes part in"
            )
        local = rank.local
        match said["verb"]:
            case "reserve":
                return await self._reserve(said["sizes"], said["kept"])
            case "begin":
                return await self._begin(Key.parse(said["key"]), writer)
            case "filled":
                return self._fill(Key.parse(said["key"]), local)
            case "void":
                return self._give_up(Key.parse(said["key"]), said["why"])
            case "ranks":
                return sorted(each.local for each in self._ranks.values())
            case "ended":
                claims = {claim.key for slot in self._slots if (claim := slot.claimed()) is not None}
                under_way = claims | self._storing.saves.keys()
                return self._ends.find(
                    [Key.parse(key) for key in said["keys"]], lambda key: key in under_way or key in self._filling
                )
            case "lost":
                return sorted(self._membership.known - {each.local for each in self._ranks.values()})
            case "drop_ahead":
                return await drop_steps_ahead(self._storing, self._memory, self._ends, rank.run.attempt, said["to"])
            case "tidying":
                return self._keeper.is_tidying
            case "bye":
                self._membership.gone.add(local)
                return None
        raise CheckpointError(f"no such verb: {said['verb']}")

    async def _hello(self, writer: asyncio.StreamWriter, said: dict[str, Any]) -> dict[str, Any]:
        if said["protocol"] != control.PROTOCOL:
            why = f"this writer, of another everstep, speaks protocol {control.PROTOCOL}, not {said['protocol']}"
            raise CheckpointError(f"{why}; when no run needs it any more, end it: kill {os.getpid()}")
        config = WriterConfig(**said["config"])
        local = int(said["local"])
        self._verifier.stop()
        await self._disown(config)
        await self._membership.wait_for_place(writer, config, local)
        if self._ended.is_set():  # while this rank waited: it has seen nobody connected, and given the memory back
            raise ConnectionAbortedError("this writer ends, and the rank gets another one")
        if not self._membership.is_of_run(config):
            self._take_over(config, said.get("environment", {}))
        self._membership.config = config  # the keeper of our copies is known now
        if writer not in self._ranks:
            before = self._membership.find_earlier_connection(writer, local)
            self._filling.join(local, writer, before, is_new_process=self._membership.is_new_process(writer, local))
        self._membership.join(writer, local, config)
        self._memory.cancel_removal()
        self._copier.aim(config.keeper, config.secret)
        for slot in self._slots:
            self._recover(slot, config)
        return {"port": self._peers.trust(config.secret, config.slots)}

    def _take_over(self, config: WriterConfig, environment: dict[str, str]) -> None:
        """This run has the node from here on. What an earlier one's ranks had filled is still stored: see _recover."""
        Slots.create(self._slots.directory, 0)  # reserve() makes the slots, once they are known to find room
        self._membership.take_over(config)
        self._ends.clear()
        self._filling = Filling()
        self._storing.take_over(config)
        self._keeper.take_over(environment)

    async def _disown(self, config: WriterConfig) -> None:
        """Free what a run left here whose store was deleted since. Which of the two goes on, the store knows."""

        def is_replaced() -> bool:
            return self._config is not None and is_other_run(self._config.run, config.run)

        strangers = self._memory.find_slots_of_other_runs(config.run)
        if not strangers and not is_replaced():
            return
        store = open_store(config.url, **config.options)
        why = await self._loop.run_in_executor(None, partial(attempts.explain_replaced_store, store, config.run))
        if why is not None:
            raise CheckpointError(why)
        if is_replaced():
            # Its saves are on their way into the same place, maybe under the same names: they end with this process.
            self._ended.set()
            raise ConnectionAbortedError("another run has this store now, and gets a writer of its own")
        for slot in strangers:
            slot.release()

    def _recover(self, slot: Slot, config: WriterConfig) -> None:
        """Slots that no living save is about: a writer or an attempt before us left them."""
        claim = slot.claimed()
        if claim is None or claim.key in self._storing.saves:
            return
        match slot.state:
            case SlotState.FILLING if claim.key not in self._filling or claim.key.attempt != Attempt.parse(
                config.attempt
            ):
                slot.release()
            case SlotState.FILLED | SlotState.WHOLE:
                _log.info("%s was left behind: storing it", claim.key)
                self._filling.forget(claim.key)
                self._storing.start(slot, claim, config, left_behind=True)
            case SlotState.STORED if claim.node == 0:  # the writer before us may have died just before the commit
                self._storing.start(slot, claim, config, left_behind=True)

    def _lose(self, writer: asyncio.StreamWriter) -> None:
        lost = self._ranks.pop(writer, None)
        if lost is None or self._ended.is_set():  # it is this process that leaves, and no rank
            return
        self._changed.set()
        self._idle_since = time.monotonic()
        if self._config is None or not self._membership.is_of_run(lost.run):
            return
        for key in self._filling.without(lost.local, writer):
            self._give_up(key, f"{CheckpointRankLost([self._config.ranks[lost.local]], LEFT_EARLY)}")

    # ---- a save

    async def _reserve(self, sizes: list[int], kept: list[int]) -> str | None:
        """Say at once whether there is room; the pages come while training runs, `begin` waits for them.

        `kept`: the sizes of another node's parts. Why they find no room, where the run does not insist on it.
        """
        assert self._config is not None
        if not self._has_directory():
            raise ConnectionAbortedError("the slots were removed, and the rank gets a writer that makes them anew")
        await self._memory.wait_until_ended()  # how an earlier one ended is nothing to this one
        count = self._config.slots
        await self._remove_surplus(count)
        return await self._memory.reserve(sizes, kept, count, insists=self._config.insist)

    async def _remove_surplus(self, count: int) -> None:
        if self._copier.busy:  # it may send one of them
            return
        moved = move_surplus_away(self._slots, count, self._storing.saves, self._storing.newest)
        self._keeper.forget(moved)
        if moved:
            await self._loop.run_in_executor(None, self._slots.clear_removed)

    async def _begin(self, key: Key, writer: asyncio.StreamWriter) -> int:
        """Return the number of the slot for this save, as soon as one is free."""
        self._leave_behind(key, self._ranks[writer].local)
        await self._memory.wait_until_reserved()
        began = time.monotonic()
        while True:
            try:
                return self._find_slot(key, writer)
            except NoSlot:
                local, waited = self._ranks[writer].local, time.monotonic() - began
                saves = self._storing.saves.values()
                if not will_be_free(self._slots, saves, self._filling, local=local, waited_seconds=waited):
                    raise
            await asyncio.sleep(0.005)

    def _leave_behind(self, key: Key, local: int) -> None:
        """This rank is at a newer save: what it has not filled of earlier ones it never will, and nobody waits for it.
        It has filled what it could not say, because it lost its connection then."""
        for passed in self._filling.list_passed(local, key):
            slot = next((slot for slot in self._slots if (its := slot.claimed()) and its.key == passed), None)
            if slot is not None and slot.has_record(local, passed):
                self._fill(passed, local)
            else:
                rank = self._config.ranks[local] if self._config is not None else local
                self._give_up(passed, f"rank {rank} has not taken part in it, and is at step {key.step} by now")

    def _find_slot(self, key: Key, writer: asyncio.StreamWriter) -> int:
        """Return the slot that another rank has begun this save in, or one that is claimed for it now. NoSlot."""
        assert self._config is not None
        rank, ranks = self._ranks[writer], self._config.ranks
        if not self._membership.is_of_run(rank.run):  # while it waited
            raise CheckpointError(f"attempt {self._config.attempt} has taken over this node from {rank.run.attempt}")
        self._filling.check(key)
        newest = {its.local: each for each, its in self._ranks.items() if its.run == rank.run}
        if (found := self._slots.find_claimed(key)) is not None:
            if key not in self._filling:
                raise CheckpointError(f"{key} was given up")
            self._filling.begin(key, rank.local, writer, newest)
            return found[0].number
        self._membership.check_present(newest, ranks)
        slot = choose_slot(self._slots, self._config.slots, self._storing.saves.values(), self._filling)
        slot.claim(Claim(key, len(ranks), self._config.node, self._config.nodes, self._config.run))
        self._filling.begin(key, rank.local, writer, newest)
        return slot.number

    def _fill(self, key: Key, local: int) -> None:
        assert self._config is not None
        if not self._filling.fill(key, local, len(self._config.ranks)):
            return
        if (found := self._slots.find_claimed(key)) is not None:
            self._storing.start(*found, self._config)
            return
        self._report_removed(key)  # no rank waits for an answer: all learn it from a report

    def _report_removed(self, key: Key) -> None:
        self._report({"event": "failed", "key": str(key), "why": slot_files.explain_removed(self._slots.directory)})

    def _is_summing(self) -> bool:
        """Tell whether something that all ranks have filled is going to be whole."""
        return any(
            slot.state is SlotState.FILLED and (claim.key in self._storing.saves or claim.key in self._filling)
            for slot in self._slots
            if (claim := slot.claimed()) is not None
        )

    def _give_up(self, key: Key, why: str) -> None:
        """This save will not be complete: a slot that is being filled is free again, one that is stored is not."""
        self._storing.give_up(key, why)
        if not self._filling.give_up(key, why):
            return
        if (found := self._slots.find_claimed(key)) is not None:
            found[0].release()
        self._report({"event": "failed", "key": str(key), "why": why})

    def _copied(self, key: Key, why: str | None) -> None:
        """In the copier's thread: a copy has ended."""

        def tell() -> None:
            self._idle_since = time.monotonic()
            self._report({"event": "copied" if why is None else "copy_failed", "key": str(key), "why": why or ""})
            self._changed.set()

        with contextlib.suppress(RuntimeError):  # this process ends
            self._loop.call_soon_threadsafe(tell)

    # ---- time

    async def _watch(self) -> None:
        while not self._has_ended():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), min(1.0, max(_SHORTEST_LOOK, self._linger / 4)))
            self._changed.clear()
            try:
                self._verifier.look(is_idle=not self._ranks and not self._storing.is_busy)
                if self._has_directory():
                    await self._socket.open_if_removed()
                if self._config is not None and self._has_directory():
                    self._storing.try_again(self._config)
                    if not self._memory.is_reserving:
                        await self._remove_surplus(self._config.slots)
                self._storing.tell_stalled()
            except Exception:  # it may pass, and without this task nobody would ever end the process
                _log.exception("while looking after the slots")
        self._ended.set()

    def _has_ended(self) -> bool:
        try:
            return self._done()
        except OSError:  # as for one of the slots, so in a second for all
            _log.exception("the slots in %s cannot be looked at", self._slots.directory)
            return False

    def _done(self) -> bool:
        ended_well = self._membership.has_ended_well
        if ended_well and self._storing.newest is not None:
            self._storing.give_up_earlier(self._storing.newest)
        if self._storing.is_busy:
            return False
        if not self._has_directory():  # what is there now is another run's, or nobody's
            for key in self._filling.list_begun():
                self._report_removed(key)
            return True
        if ended_well and not self._storing.list_unsaved():
            return self._remove_slots()
        if self._copier.busy or self._ranks:
            return False
        if self._told_to_end:
            return True
        if self._memory.found_no_room and self._memory.is_empty():
            return self._remove_slots()  # the ranks were told, and left
        # The first rank needs a moment to connect.
        linger = self._linger if self._config is not None else max(self._linger, control.START_TIMEOUT)
        if time.monotonic() - max(self._idle_since, self._storing.quiet_since) < linger:
            return False
        # Nobody came back. What is in the store too need not take memory from whoever is next on this node.
        if all(slot.state in (SlotState.EMPTY, SlotState.FILLING, SlotState.STORED) for slot in self._slots):
            return self._remove_slots()
        return True

    def _remove_slots(self) -> bool:
        """Remove the slots; a process that restores from them is waited for, as long as ranks are."""
        self._keeper.forget(self._slots)
        return self._memory.remove(0.0 if self._told_to_end else self._linger)

    def _report(self, report: dict[str, Any]) -> None:
        _log.info("%s", report)
        self._ends.note(report)
        line = json.dumps(report).encode() + b"\n"
        for writer in self._ranks:
            with contextlib.suppress(ConnectionError):
                writer.write(line)


async def _serve_node(directory: Path, linger: float, has_directory: Callable[[], bool]) -> None:
    writer = Writer(directory, linger, has_directory)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, writer.tell_to_end)
    await writer.serve()


def main() -> None:
    """Run the writer of the directory that the command line names, as `control.start_writer` starts it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--linger", type=float, default=600.0)
    parser.add_argument("--patience", type=float, default=30.0)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # these are meant for the ranks
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, max(_NICE, os.getpriority(os.PRIO_PROCESS, 0)))  # training first
        Path("/proc/self/comm").write_text("everstep-writer")  # by which an agent knows it
    locked = lock_directory(arguments.directory, arguments.patience)
    Slots(arguments.directory).clear_removed()
    asyncio.run(_serve_node(arguments.directory, arguments.linger, lambda: locked.is_valid))
    locked.release()
    sys.stderr.flush()
    os._exit(0)  # a thread that hangs in a store would be waited for
