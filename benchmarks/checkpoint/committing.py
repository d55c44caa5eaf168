"""Measure a commit at many ranks: `python -m benchmarks.checkpoint.committing`, without torch and bytes of tensors.

Nodes are simulated one after the other, each step in a process of its own, so that its memory can be told: a node
announces what it wrote, node 0 commits what all have announced, and a rank of a restore reads the part that it needs.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.interval import Interval

TARGET = 5.0  # seconds of the committer for each save
REPEATS = 3
SHARDED, REPLICAS = "sharded", "replicas"
ROWS = 8  # of each rank's shard
WIDTH = 1024


def rows() -> Iterator[Interval]:
    """Yield a row for each spread: the seconds that node 0 takes to commit what all nodes have announced."""
    for spread in (SHARDED, REPLICAS):
        with tempfile.TemporaryDirectory(prefix="committing-") as folder:
            run_step("announce", spread, folder)
            commits = []
            for _ in range(REPEATS):
                for committed in (Path(folder) / "manifests").glob("*"):
                    committed.unlink()
                commits.append(run_step("commit", spread, folder)["seconds"])
            yield Interval(f"commit-{spread}", "s", TARGET, {"ours": commits}, absolute=True)


def main() -> None:
    """Print a line for each spread and step: seconds, and MiB beyond what the interpreter takes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=64)
    parser.add_argument("--ranks", type=int, default=8, help="of each node")
    parser.add_argument("--tensors", type=int, default=2200)
    parser.add_argument("--step", help=argparse.SUPPRESS)
    parser.add_argument("--spread", help=argparse.SUPPRESS)
    parser.add_argument("--store", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.step:
        print(json.dumps(measured(options)))
        return
    print(f"{options.nodes * options.ranks} ranks on {options.nodes} nodes, {options.tensors} tensors")
    for spread in (SHARDED, REPLICAS):
        with tempfile.TemporaryDirectory(prefix="committing-") as folder:
            for step in STEPS:
                found = run_step(step, spread, folder, *sys.argv[1:])
                shown = ", ".join(f"{name} {value:.3g}" for name, value in found.items())
                print(f"{spread:9} {step:12} {shown}", flush=True)


def run_step(step: str, spread: str, folder: str, *options: str) -> dict[str, float]:
    """Run one step in a process of its own, and return what it took.

    Args:
        step: One of STEPS.
        spread: Whether each tensor has a shard on each rank, or is on one of them.
        folder: The store.
        options: Of the command line.
    """
    command = [sys.executable, "-m", "benchmarks.checkpoint.committing", *options]
    command += ["--step", step, "--spread", spread, "--store", folder]
    found: dict[str, float] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return found


def measured(options: Any) -> dict[str, float]:
    """Return the time and memory that this process took for one step."""
    from everstep.checkpoint.store.posix import PosixStore

    store = PosixStore(options.store)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began, used = time.perf_counter(), time.process_time()
    more = STEPS[options.step](store, options)
    seconds, used = time.perf_counter() - began, time.process_time() - used
    peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    return {"seconds": seconds, "processor_seconds": used, "MiB": peak, **(more or {})}


def announce(store: Any, options: Any) -> dict[str, float]:
    """Write and announce the manifests of all nodes; the seconds of one of them are told apart."""
    from everstep.checkpoint.publish import commit

    each = []
    for node in range(options.nodes):
        manifest = node_manifest(options, node)
        began = time.process_time()
        commit.announce_node(store, node, manifest)
        each.append(time.process_time() - began)
    sizes = {entry.name: entry.size for entry in store.list(manifest.key.data_prefix)}
    share = commit.read_announcement(store, manifest.key, 0).nodes[0]
    return {
        "processor_seconds_of_a_node": sorted(each)[len(each) // 2],
        "MB_of_a_node_manifest": share.size / 1e6,
        "MB_of_an_announcement": sizes[manifest.key.node_name(0)] / 1e6,
    }


def commit_all(store: Any, options: Any) -> dict[str, float]:
    """Node 0's commit."""
    from everstep.checkpoint.publish import commit

    commit.commit_checkpoint(store, the_key(), options.nodes, fenced=lambda: None, timeout=60)
    return {"MB_of_the_index": len(store.read(the_key().manifest_name)) / 1e6}


def read_part(store: Any, options: Any) -> dict[str, float]:
    """Return the shards that the last rank of a restore needs on as many ranks: its shards, or every replica."""
    from everstep.checkpoint.catalog.manifests import read_index, read_manifest

    index = read_index(store, the_key())
    began = time.process_time()
    world = options.nodes * options.ranks
    rows = ((world - 1) * ROWS, world * ROWS)
    wanted = {name: [(rows, (0, WIDTH))] if options.spread == SHARDED else None for name in index.tensors}
    nodes = index.nodes_of(wanted) | index.nodes_of_ranks([world - 1])
    read_manifest(store, the_key(), nodes=nodes, index=index)
    return {"processor_seconds_after_the_index": time.process_time() - began, "nodes": len(nodes)}


STEPS: dict[str, Callable[[Any, Any], dict[str, float]]] = {
    "announce": announce,
    "commit": commit_all,
    "read a part": read_part,
}


def the_key() -> Any:
    from everstep.checkpoint.format.keys import Attempt, Key

    return Key(Attempt(0, 1), 1000)


def node_manifest(options: Any, node: int) -> Any:
    """Make what a node wrote: one shard a rank of sharded tensors, of replicas those that its ranks were to write."""
    from everstep.checkpoint.format.manifest import HEADER, CheckpointPart, Chunk, Manifest, Shard, StoredTensor

    world, size = options.nodes * options.ranks, ROWS * WIDTH * 4
    ranks = range(node * options.ranks, (node + 1) * options.ranks)
    at = [HEADER] * options.ranks
    tensors = {}
    for number in range(options.tensors):
        name, shards = f"model.layers.{number // 20}.{number % 20}.weight", []
        for local, rank in enumerate(ranks):
            if options.spread == REPLICAS and number % world != rank:
                continue
            first = rank * ROWS if options.spread == SHARDED else 0
            chunk = Chunk(local, at[local], size, f"{number * world + rank:016x}")
            shards.append(Shard((first, 0), (ROWS, WIDTH), (chunk,)))
            at[local] += size
        shape = (world * ROWS if options.spread == SHARDED else ROWS, WIDTH)
        if shards:
            tensors[name] = StoredTensor("float32", shape, tuple(shards))
    key = the_key()
    parts = tuple(CheckpointPart(key.part_name(rank), at[local], "0" * 16) for local, rank in enumerate(ranks))
    values: dict[str, object] = {"step": 1000, **{f"rank.{rank}.rng": "0" * 12_000 for rank in ranks}}
    return Manifest(key, world, 1, "model", "xxh3_64", 1.5, parts, tensors, values)


if __name__ == "__main__":
    main()
