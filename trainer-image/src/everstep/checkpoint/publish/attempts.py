"""Attempts where no operator gives them: each run claims the next one, and no run takes one that is over.

And what a store is called, so that memory which outlives a store that was deleted is not taken for the next one's.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from everstep.checkpoint.errors import CheckpointError, Missing, StoreError
from everstep.checkpoint.format.keys import ATTEMPTS, DATA, MANIFESTS, RUN, Attempt, Key
from everstep.checkpoint.store.base import Store

OWNER = f"{ATTEMPTS}job"  # whose store it is, as the first job with given attempts has claimed it
_BOOT = Path("/proc/sys/kernel/random/boot_id")


class Superseded(CheckpointError):
    """The store holds checkpoints of a later attempt: nothing that this one saves would ever be chosen."""


class AttemptTaken(CheckpointError):
    """Raised when another run has claimed the very attempt that was given to this one."""


class StoreTaken(CheckpointError):
    """Raised when a store is another job's."""


class NotShared(StoreError):
    """Two nodes of a run have been given stores of one name, each a place of its own."""


@dataclass(frozen=True)
class RunIdentity:
    """The identity of a run that claims an attempt.

    Attributes:
        job: The namespace and the name of its job with a slash between; empty where none is known.
        machines: The boot ids of its machines.
    """

    job: str
    machines: tuple[str, ...]

    def is_same_run(self, other: RunIdentity) -> bool:
        """Tell whether both may be one run: of the same job or, where that is not known, with a machine in common.

        A launcher that starts ranks again on the machines that are left begins no other run.
        """
        if self.job and other.job:
            return is_same_job(self.job, other.job)
        return bool({*self.machines} & {*other.machines})

    def __str__(self) -> str:
        return f"{f'job {self.job} ' if self.job else ''}on {len(self.machines)} machine(s) {', '.join(self.machines)}"


def is_same_job(one: str, other: str) -> bool:
    """Tell whether two jobs are the same: by namespace and name, or by name where one does not tell its namespace.

    One that was deleted and made anew under its name goes on. Older versions told a name alone, or the UID too.

    Args:
        one: A job, as `RunIdentity.job` has it.
        other: Another one.
    """
    first, second = (job.split("/")[:2] for job in (one, other))
    return first == second if len(first) == len(second) else first[-1] == second[-1]


def get_own_job(environ: Mapping[str, str] = os.environ) -> str:
    """Return the job of this process, as `RunIdentity.job` has it.

    Args:
        environ: The environment of the process.
    """
    name, namespace = environ.get("EVERSTEP_JOB", ""), environ.get("EVERSTEP_JOB_NAMESPACE", "")
    if "/" in name:  # of the containers that publish a folder: namespace, name and UID
        return "/".join(name.split("/")[:2])
    return f"{namespace}/{name}" if name and namespace else name


def claim_for_job(store: Store, job: str) -> None:
    """Claim a store for a job, or see that it is this job's.

    Two jobs that are given one store by mistake would take it from each other, restart by restart. Attempts that a run
    counts by itself claim no store: whoever starts it by hand means to go on.

    Args:
        store: Where the job saves.
        job: As `RunIdentity.job` has it; empty where none is known, which claims nothing.

    Raises:
        StoreTaken: It is another job's.
        StoreError: The store cannot be asked.
    """
    if not job:
        return
    owner = _read_owner(store)
    if owner is None:
        owner = _find_last_job(store)
        if not owner or is_same_job(owner, job):
            if store.put_if_absent(OWNER, job.encode()):
                return
            owner = _decode_owner(store.read(OWNER))
    if not is_same_job(owner, job):
        raise StoreTaken(
            f"{store.url} is the store of job {owner}, and this is job {job}: give each job a store of its own. To go "
            "on from what that job has saved, copy it there first (everstep checkpoint copy). If that job is gone for "
            f"good, and this one is to have its store, write {job} into {OWNER} in it"
        )


def _read_owner(store: Store) -> str | None:
    try:
        return _decode_owner(store.read(OWNER))
    except Missing:
        return None


def _decode_owner(data: bytes) -> str:
    # A person who writes it leaves a line break. What is damaged is no job's, and a message shows it.
    return data.decode("utf-8", "backslashreplace").strip()


def _find_last_job(store: Store) -> str:
    """Return the job of the greatest attempt that tells one: of a store that has claims, and no owner yet."""
    for attempt in sorted(_iterate_claimed_attempts(store), reverse=True):
        with suppress(Missing):
            first = read_identity(store, attempt)
            if first is not None and first.job:
                return first.job
    return ""


def identify_machine() -> str:
    """Return the identity of the machine since its boot, alike in all of its containers.

    That is the host's name where the kernel does not say.
    """
    with suppress(OSError):
        return _BOOT.read_text().strip()
    return socket.gethostname()


def claim_store(store: Store, given: Attempt, identity: RunIdentity) -> None:
    """Claim a store for a run that was given its attempt: for its job, and the attempt for the run itself.

    Args:
        store: Where the run saves.
        given: Its attempt.
        identity: Who it is.

    Raises:
        StoreTaken: The store is another job's.
        Superseded: A later attempt has it.
        AttemptTaken: Another run was given the same one.
        StoreError: The store cannot be asked.
    """
    claim_for_job(store, identity.job)
    check_not_superseded(store, given)
    claim_given_attempt(store, given, identity)


def claim_given_attempt(store: Store, attempt: Attempt, identity: RunIdentity) -> None:
    """Claim an attempt that was given to this run, or see that it was this run that has claimed it.

    Raises:
        AttemptTaken: It was another one: both would save under the same names.
        StoreError: The store cannot be asked.
    """
    name = f"{ATTEMPTS}{attempt}"
    if store.put_if_absent(name, json.dumps(asdict(identity)).encode()):
        return
    first = read_identity(store, attempt)
    if first is not None and not first.is_same_run(identity):
        raise AttemptTaken(
            f"attempt {attempt} of {store.url} is that of a run {first}; this run, {identity}, was given the same one. "
            "Give each run a store of its own. If the other one has ended and this one is to go on from it, start this "
            "one as a later attempt: a greater generation, or without attempt="
        )


def read_identity(store: Store, attempt: Attempt) -> RunIdentity | None:
    """Return the run that has claimed an attempt; None where it says nothing about itself, as one whose attempts are
    counted. StoreError when the store cannot be asked, Missing when nobody has claimed it."""
    try:
        fields = json.loads(store.read(f"{ATTEMPTS}{attempt}"))
        return RunIdentity(str(fields["job"]), tuple(map(str, fields["machines"])))
    except (ValueError, KeyError, TypeError):
        return None


def claim_next_attempt(store: Store, after: Attempt | None = None) -> Attempt:
    """Return an attempt greater than every other that has claimed, saved or committed in this store, and than `after`.

    Nobody else gets it.
    """
    greatest = max(filter(None, (_find_greatest_attempt(store), after)), default=None)
    attempt = Attempt(greatest.epoch, greatest.generation + 1) if greatest else Attempt(0, 1)
    while not store.put_if_absent(f"{ATTEMPTS}{attempt}", b""):
        attempt = Attempt(attempt.epoch, attempt.generation + 1)
    return attempt


def check_not_superseded(store: Store, attempt: Attempt) -> None:
    """Raise Superseded if something greater than `attempt`, which was given to this run, is in the store already."""
    greatest = _find_greatest_attempt(store)
    if greatest is not None and greatest > attempt:
        raise Superseded(
            f"{store.url} belongs to attempt {greatest}, this run is attempt {attempt}: another run has used this "
            "store, or is using it; give each job a place of its own. If that run has ended, or was copied here, and "
            "this one is to go on from it, begin as a later attempt: delete the job and apply it again"
        )


def run_of(store: Store) -> str:
    """Return the random name that all attempts of a store share; one without any gets it. Empty where it is damaged."""
    try:
        return _read_name(store) or ""
    except Missing:
        store.put_if_absent(RUN, secrets.token_hex(16).encode())
        return _read_name(store) or ""


def find_successor(store: Store, attempt: Attempt) -> str | None:
    """Return why `attempt` may not commit any more: a greater one has committed. None when there is none.

    Its checkpoints would never be chosen, and retention after them would count them among the newest.
    """
    greater = [key.attempt for key in _iterate_committed_keys(store) if key.attempt > attempt]
    return f"attempt {max(greater)} has taken over this store" if greater else None


def read_run(store: Store) -> str | None:
    """Return the name that run_of() gave the store, without giving it one.

    Returns:
        An empty text when the store has none; None when it cannot be asked now, or the name is damaged.
    """
    try:
        return _read_name(store)
    except Missing:
        return ""
    except StoreError:
        return None


def _read_name(store: Store) -> str | None:
    """Return the name of a store; None where it is no text, since its medium has damaged it, and says nothing."""
    with suppress(UnicodeDecodeError):
        return store.read(RUN).decode()
    return None


def check_is_shared(store: Store, run: str, here: str, first: str) -> None:
    """See that this node has the store of the first one, which has given it its name.

    Args:
        store: That of this node.
        run: What run_of() said on the first node; empty where that is not known.
        here: This node, for a person.
        first: The first node.

    Raises:
        NotShared: It has another one, or a network's file system does not show yet what the other machine has written.
        StoreError: It cannot be asked.
    """
    try:
        found = _read_name(store) if run else run
    except Missing:
        found = ""
    if found not in (None, run):
        why = (
            f"{here} does not see in it what {first} has written there{'' if found else ', or not yet'}, and a "
            "checkpoint of both is never whole so: give all nodes one store that they share, such as a mounted volume "
            "or s3://"
        )
        raise NotShared(why, store.url, may_pass=not found)


def explain_replaced_store(store: Store, run: str) -> str | None:
    """Return why a run may not write any more: its store was deleted, and is another's.

    Args:
        store: Where it writes.
        run: What run_of() said when it began; empty where that is not known.

    Raises:
        StoreError: The store is not there now, e.g. because it was unmounted, or cannot be asked.
    """
    if not run:
        return None
    try:
        found = _read_name(store)
    except Missing as error:
        # Only a run that begins makes a store: what is written into nothing is lost from sight when it comes back.
        why = f"has no object named {RUN} any more, which this run has seen there: it was unmounted, moved or deleted"
        raise StoreError(why, store.url, may_pass=True) from error
    return None if found in (None, run) else f"{store.url} was deleted and made anew since, for another run"


def _find_greatest_attempt(store: Store) -> Attempt | None:
    found = set(_iterate_claimed_attempts(store))
    found.update(key.attempt for key in _iterate_committed_keys(store))
    for entry in store.list(DATA):
        with suppress(ValueError):
            found.add(Key.of_data(entry.name).attempt)
    return max(found, default=None)


def _iterate_claimed_attempts(store: Store) -> Iterator[Attempt]:
    for entry in store.list(ATTEMPTS):
        with suppress(ValueError):
            yield Attempt.parse(entry.name.removeprefix(ATTEMPTS))


def _iterate_committed_keys(store: Store) -> Iterator[Key]:
    for entry in store.list(MANIFESTS):
        with suppress(ValueError):
            yield Key.of_manifest(entry.name)
