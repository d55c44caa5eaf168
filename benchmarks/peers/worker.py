"""The worker that every contender runs: ranks that meet at a barrier and exit when one of them is lost.

It speaks to `benchmarks.barrier.Ear` as the ranks of the other benchmarks do. It is a program of its own since a peer
that is lost without a word, with its node, must be noticed here: within 30 s, as a training script's collectives would.
"""

from __future__ import annotations

IMAGE = "docker.io/everstep/peers:test"
NOTICE_SECONDS = 30
WORKER = """
import os, select, signal, socket, time
signal.signal(signal.SIGTERM, lambda *_: os._exit(143))  # process 1 would ignore it
env = os.environ
rank = int(next(env[name] for name in ('OMPI_COMM_WORLD_RANK', 'RANK', 'JOB_COMPLETION_INDEX') if name in env))
world, master, port = int(env['WORLD']), env['MASTER_ADDR'], int(env.get('MASTER_PORT', 29500))
ear = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); ear.connect((env['EAR'], int(env['EAR_PORT'])))
tell = lambda what: ear.send(f"{env['TAG']} {rank} {what}".encode())
def watched(peer):
    peer.settimeout(None)
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 4)):
        peer.setsockopt(socket.IPPROTO_TCP, option, value)
    return peer
def meet():
    if rank == 0:
        door = socket.socket(); door.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        door.bind(('', port)); door.listen(world)
        peers = [watched(door.accept()[0]) for _ in range(world - 1)]
        for peer in peers: peer.sendall(b'g')
        door.close()
        return peers
    while True:
        try:
            peer = watched(socket.create_connection((master, port), timeout=1))
            if peer.recv(1) == b'g': return [peer]
        except OSError: pass
        time.sleep(0.01)
tell('started')
peers = meet()
tell('passed')
ready, _, _ = select.select([ear, *peers], [], [])
os._exit(0 if ear in ready and ear.recv(64) == b'done' else 1)  # told to exit, or a peer is lost
"""
COMMAND = ["python3", "-u", "-c", WORKER]
