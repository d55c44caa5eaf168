"""The operator's own poller and this leader understand each other: neither is pretended here."""

from __future__ import annotations

from pathlib import Path

from everstep.agent.wire.protocol import Gpu
from everstep_operator.cluster.leader_poller import LeaderPoller
from everstep_operator.plan.actions import LeaderPoll
from everstep_operator.plan.leader_view import SickGpu

from .fakes import TOKEN, gang, until

KEY = ("default", "digits")


async def test_state_charges_peers_and_stop(tmp_path: Path) -> None:
    async with gang(tmp_path, 2) as agents:
        leader = agents[0].leader
        assert leader is not None
        poller = LeaderPoller(lambda key, delay: None, fence_timeout=6)
        try:
            poller.ensure_polled(KEY, LeaderPoll(agents[0].address, "pod-a", 1, 1, "", 1), TOKEN)
            await until(lambda: (view := poller.view(KEY, "pod-a")) and view.phase == "running")
            polled = poller._jobs[KEY]
            assert poller.push_peers(KEY, 1, {a.config.index: a.address for a in agents})
            await until(lambda: not polled.commands)
            assert polled.pushed is not None
            assert poller.push_peers(KEY, 2, {})  # another leader's
            await until(lambda: not polled.commands)
            assert polled.pushed[1] == 1

            agents[1].node.gpus((Gpu("GPU-1", "H100"), Gpu("GPU-2", "H100", "no spare memory rows")))
            await until(lambda: (view := poller.view(KEY, "pod-a")) and view.sick_gpus)
            view = poller.view(KEY, "pod-a")
            assert view is not None
            assert view.sick_gpus == (SickGpu(1, "H100", "no spare memory rows"),)

            agents[1].processes.exit(7, "ValueError: no")
            await until(lambda: (view := poller.view(KEY, "pod-a")) and view.history)
            view = poller.view(KEY, "pod-a")
            assert view is not None
            (entry,) = view.history
            assert (entry.id, entry.cause, entry.index, entry.rank) == ("1.1", "Application", 1, 2)
            assert entry.message == "ValueError: no"

            # Charged, and nothing left: the next failure is the last.
            poller.ensure_polled(KEY, LeaderPoll(agents[0].address, "pod-a", 1, 1, "1.1", 0), TOKEN)
            await until(lambda: leader.phase == "running" and leader.generation == 2)
            await until(lambda: leader.budget._allowance == 0)
            agents[1].processes.exit(7, "ValueError: no")
            await until(lambda: (view := poller.view(KEY, "pod-a")) and view.outcome)
            view = poller.view(KEY, "pod-a")
            assert view is not None
            assert view.outcome is not None
            assert (view.outcome.result, view.outcome.exit_code, view.outcome.failure) == ("failed", 7, "1.2")
        finally:
            await poller.close()


async def test_stop(tmp_path: Path) -> None:
    async with gang(tmp_path, 1) as agents:
        poller = LeaderPoller(lambda key, delay: None, fence_timeout=6)
        try:
            poller.ensure_polled(KEY, LeaderPoll(agents[0].address, "pod-a", 1, 1, "", 1), TOKEN)
            poller.send_stop(KEY, "suspended")
            await until(lambda: (view := poller.view(KEY, "pod-a")) and view.outcome)
            assert agents[0].node.ended.result().result == "stopped"
        finally:
            await poller.close()
