"""The leader poller against leaders that answer, lie, flood, vanish, or were never there."""

from __future__ import annotations

import asyncio
import collections
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import web
from prometheus_client import REGISTRY
from structlog.testing import capture_logs

from e2e.cluster.ports import free_ports
from everstep_operator.cluster.action_executor import ActionExecutor, JobRef
from everstep_operator.cluster.agent_code import AgentCode
from everstep_operator.cluster.leader_poller import COMMAND_AGAIN_SECONDS, LeaderAnswerError, LeaderPoller
from everstep_operator.plan.actions import LeaderPoll, PushPeers, StopLeader
from everstep_operator.settings import OperatorSettings
from tests.integration.world import FakeLeader, until
from tests.operator.odd_leaders import serve_leader

KEY = ("ns", "digits")
TOKEN = bytes(range(32))


class Woken:
    def __init__(self) -> None:
        self.calls: list[float] = []
        self.poller = LeaderPoller(lambda key, delay: self.calls.append(delay), fence_timeout=6)


@pytest_asyncio.fixture
async def woken() -> AsyncIterator[Woken]:
    made = Woken()
    yield made
    await made.poller.close()


@pytest_asyncio.fixture
async def leader() -> AsyncIterator[FakeLeader]:
    made = await FakeLeader(TOKEN, "127.0.0.1", free_ports(1)[0], epoch=1).start()
    yield made
    await made.stop()


def poll(leader: FakeLeader, uid: str = "pod-a", charged: str = "", allowance: int = 3) -> LeaderPoll:
    return LeaderPoll(f"{leader.address}:{leader.port}", uid, leader.state["epoch"], 1, charged, allowance)


async def reachable(woken: Woken, expected: bool = True) -> None:
    async def check() -> bool:
        view = woken.poller.view(KEY, "pod-a")
        return view is not None and view.reachable is expected

    await until(check, f"reachable is {expected}")


async def told(woken: Woken, addresses: dict[int, str]) -> None:
    """Push the table again and again until the leader has it."""

    async def check() -> bool:
        woken.poller.push_peers(KEY, 1, addresses)
        pushed = woken.poller._jobs[KEY].pushed
        return pushed is not None and pushed[2] == addresses and not woken.poller._jobs[KEY].commands

    await until(check, "the leader has the table")


async def test_news_wakes_the_planner_at_once(woken: Woken, leader: FakeLeader) -> None:
    woken.poller.ensure_polled(KEY, poll(leader), TOKEN)
    await reachable(woken)
    await leader.say(phase="running", generation=2)

    async def news() -> bool:
        view = woken.poller.view(KEY, "pod-a")
        return view is not None and view.generation == 2

    await until(news, "the second state")
    assert woken.calls == [0.0, 0.0]


async def test_steps_alone_can_wait(woken: Woken, leader: FakeLeader) -> None:
    woken.poller.ensure_polled(KEY, poll(leader), TOKEN)
    await reachable(woken)
    await leader.say(progress={"step": 7})

    async def news() -> bool:
        return len(woken.calls) > 1

    await until(news, "progress")
    assert woken.calls[1] > 0


async def test_one_challenge_serves_a_whole_conversation(woken: Woken, leader: FakeLeader) -> None:
    challenges = 0
    issue = leader._nonces.issue

    def counted(now: float) -> str:
        nonlocal challenges
        challenges += 1
        return issue(now)

    leader._nonces.issue = counted  # type: ignore[method-assign]
    woken.poller.ensure_polled(KEY, poll(leader), TOKEN)
    await reachable(woken)
    for generation in range(2, 6):
        asked = len(leader.asked("state"))
        await leader.say(generation=generation)

        async def answered(asked: int = asked) -> bool:
            return len(leader.asked("state")) > asked

        await until(answered, "the next poll")
    assert challenges <= len(leader.asked("state")) + 2  # one for each answer, and the first


async def test_the_newest_charge_and_the_allowance_are_carried(woken: Woken, leader: FakeLeader) -> None:
    woken.poller.ensure_polled(KEY, poll(leader), TOKEN)
    await reachable(woken)
    woken.poller.ensure_polled(KEY, poll(leader, charged="1.1", allowance=2), TOKEN)
    await leader.say(generation=2)

    async def carried() -> bool:
        return any(q["charged"] == "1.1" and q["allowance"] == "2" for _, _, q, _ in leader.asked("state"))

    await until(carried, "the new allowance")


async def test_a_leader_that_vanishes_is_reported_and_found_again(woken: Woken, leader: FakeLeader) -> None:
    woken.poller.ensure_polled(KEY, poll(leader), TOKEN)
    await reachable(woken)
    await leader.stop()
    await reachable(woken, False)
    await leader.start()
    await reachable(woken)


async def test_a_leader_that_is_not_to_be_asked_any_more_stays_known_until_it_is_forgotten(
    woken: Woken, leader: FakeLeader
) -> None:
    """Its last answer, and the time of it, are evidence of the death of its machine."""
    woken.poller.ensure_polled(KEY, poll(leader), TOKEN)
    await reachable(woken)
    (task,) = (t for t in asyncio.all_tasks() if t.get_name() == "leader of ns/digits")
    known = woken.poller.view(KEY, "pod-a")
    woken.poller.pause_polling(KEY)
    await asyncio.wait((task,))
    await leader.say(generation=2)
    assert woken.poller.view(KEY, "pod-a") == known
    woken.poller.ensure_polled(KEY, poll(leader), TOKEN)

    async def news() -> bool:
        view = woken.poller.view(KEY, "pod-a")
        return view is not None and view.generation == 2

    await until(news, "the second state")
    woken.poller.pause_polling(KEY)
    woken.poller.stop_polling(KEY)
    assert woken.poller.view(KEY, "pod-a") is None
    woken.poller.pause_polling(KEY)


async def test_another_pod_is_another_leader(woken: Woken, leader: FakeLeader) -> None:
    woken.poller.ensure_polled(KEY, poll(leader), TOKEN)
    await reachable(woken)
    woken.poller.ensure_polled(KEY, poll(leader, uid="pod-b"), TOKEN)
    assert woken.poller.view(KEY, "pod-a") is None
    view = woken.poller.view(KEY, "pod-b")
    assert view is not None
    assert view.answered_at is None


async def test_peers_are_pushed_once_to_each_leader(woken: Woken, leader: FakeLeader) -> None:
    woken.poller.ensure_polled(KEY, poll(leader), TOKEN)
    await reachable(woken)
    addresses = {0: "10.0.0.1:8470", 1: "10.0.0.2:8470"}
    await told(woken, addresses)
    assert [body for *_, body in leader.asked("peers")] == [
        {"epoch": 1, "addresses": {"0": "10.0.0.1:8470", "1": "10.0.0.2:8470"}}
    ]
    addresses[1] = "10.0.0.9:8470"
    await told(woken, addresses)
    await leader.say(incarnation="restarted")  # it has forgotten the table

    async def known() -> bool:
        view = woken.poller.view(KEY, "pod-a")
        return view is not None and view.incarnation == "restarted"

    await until(known, "the new incarnation")
    await told(woken, addresses)
    assert len(leader.asked("peers")) == 3


async def test_stop(woken: Woken, leader: FakeLeader) -> None:
    woken.poller.ensure_polled(KEY, poll(leader), TOKEN)
    for _ in range(3):
        woken.poller.send_stop(KEY, "Suspended")

    async def asked() -> bool:
        return bool(leader.asked("stop"))

    await until(asked, "it is asked to stop")
    assert [body for *_, body in leader.asked("stop")] == [{"reason": "Suspended"}]


class HangingLeader(FakeLeader):
    """Answers the poll, and accepts commands without ever answering them."""

    async def _signed(self, request: web.Request) -> web.Response:
        if request.method == "POST":
            await asyncio.Event().wait()
        return await super()._signed(request)


async def test_sixteen_hanging_leaders_cost_twenty_healthy_jobs_nothing(
    woken: Woken, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("everstep_operator.cluster.leader_poller.ANSWER_SECONDS", 3600.0)
    leaders: dict[tuple[str, str], FakeLeader] = {}
    for number, port in enumerate(free_ports(36)):
        kind = HangingLeader if number < 16 else FakeLeader
        leaders[("ns", f"job-{number}")] = await kind(TOKEN, "127.0.0.1", port, epoch=1).start()
    try:
        for key, made in leaders.items():
            woken.poller.ensure_polled(key, poll(made), TOKEN)

        async def all_answer() -> bool:
            views = [woken.poller.view(key, "pod-a") for key in leaders]
            return all(view is not None and view.reachable for view in views)

        await until(all_answer, "every leader answers the poll", 120)
        actor: Any = ActionExecutor(None, None, woken.poller, AgentCode(b""), None, (b"key",), None, None)  # type: ignore[arg-type]
        queue = collections.deque(leaders)

        async def work() -> None:  # one of the operator's workers; the hanging leaders' jobs come first
            while queue:
                key = queue.popleft()
                job = JobRef(*key, uid="u", version="1", confirmed=True)
                await actor.execute(job, [PushPeers(1, {0: "10.0.0.1:8470"}), StopLeader("Suspended")])

        async with asyncio.timeout(120):
            await asyncio.gather(*(work() for _ in range(OperatorSettings.load({}, {}).workers)))

        async def healthy_are_told() -> bool:
            healthy = [made for made in leaders.values() if not isinstance(made, HangingLeader)]
            return all(made.asked("peers") and made.asked("stop") for made in healthy)

        await until(healthy_are_told, "the commands have reached the healthy ones", 120)
    finally:
        await woken.poller.close()
        await asyncio.gather(*(made.stop() for made in leaders.values()))


async def test_one_command_of_a_kind_is_on_its_way_to_a_leader(woken: Woken) -> None:
    hanging = await HangingLeader(TOKEN, "127.0.0.1", free_ports(1)[0], epoch=1).start()
    try:
        woken.poller.ensure_polled(KEY, poll(hanging), TOKEN)
        await reachable(woken)
        assert woken.poller.push_peers(KEY, 1, {0: "10.0.0.1:8470"})
        assert woken.poller.push_peers(KEY, 1, {0: "10.0.0.1:8470"}), "it is on its way"
        assert not woken.poller.push_peers(KEY, 1, {0: "10.0.0.2:8470"}), "the caller asks again"
    finally:
        await woken.poller.close()
        await hanging.stop()


@pytest.mark.parametrize("command", ["peers", "stop"])
async def test_a_command_that_fails_wakes_the_planner(
    woken: Woken, leader: FakeLeader, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    woken.poller.ensure_polled(KEY, poll(leader), TOKEN)
    await reachable(woken)

    async def refuse(*_: object) -> bool:
        return False

    monkeypatch.setattr(woken.poller, "_send_command", refuse)
    if command == "peers":
        assert woken.poller.push_peers(KEY, 1, {0: "10.0.0.1:8470"})
    else:
        woken.poller.send_stop(KEY, "Suspended")

    async def woke() -> bool:
        return COMMAND_AGAIN_SECONDS in woken.calls

    await until(woke, "the planner is woken")


async def test_a_leader_with_another_token_is_not_believed(woken: Woken, leader: FakeLeader) -> None:
    woken.poller.ensure_polled(KEY, poll(leader), b"another token of thirty-two bytes")
    await reachable(woken, False)
    view = woken.poller.view(KEY, "pod-a")
    assert view is not None
    assert view.answered_at is None


@pytest.mark.parametrize(("forged", "size"), [(True, 0), (False, 2 << 20)])
async def test_forged_and_oversized_answers_are_no_answers(woken: Woken, forged: bool, size: int) -> None:
    runner, port = await serve_leader(
        TOKEN, forged=forged, answer=json.dumps({"phase": "running", "pad": "x" * size}).encode()
    )
    woken.poller.ensure_polled(KEY, LeaderPoll(f"127.0.0.1:{port}", "pod-a", 1, 1, "", 3), TOKEN)
    await reachable(woken, False)
    await runner.cleanup()


async def test_answers_of_a_million_lists_are_never_parsed(woken: Woken, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenant's twelve leaders that answered so kept the event loop from renewing the Lease."""
    parsed: list[int] = []
    loads = json.loads

    def counted(data: bytes, **options: Any) -> Any:
        parsed.append(len(data))
        return loads(data, **options)

    monkeypatch.setattr(json, "loads", counted)
    runner, port = await serve_leader(TOKEN, answer=b"[" + b"[]," * 166_000 + b"[]]")
    before = failed_polls()
    woken.poller.ensure_polled(KEY, LeaderPoll(f"127.0.0.1:{port}", "pod-a", 1, 1, "", 3), TOKEN)

    async def asked() -> bool:
        return failed_polls() >= before + 3

    await until(asked, "three rejected answers")
    await runner.cleanup()
    assert max(parsed) <= 1024, "nothing but challenges"


async def test_each_answer_is_charged_to_its_namespace(
    woken: Woken, leader: FakeLeader, monkeypatch: pytest.MonkeyPatch
) -> None:
    charged: list[tuple[str, float]] = []
    monkeypatch.setattr(woken.poller._budget, "charge", lambda *entry: charged.append(entry))
    woken.poller.ensure_polled(KEY, poll(leader), TOKEN)

    async def paid() -> bool:
        return bool(charged)

    await until(paid, "the first answer is charged")
    assert charged[0][0] == "ns"
    assert charged[0][1] > 0


async def test_a_leader_whose_namespace_is_in_debt_is_asked_before_it_is_fenced(
    woken: Woken, leader: FakeLeader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(woken.poller._budget, "pause", lambda *_: 3600.0)
    woken.poller.ensure_polled(KEY, poll(leader), TOKEN)

    async def asked_again() -> bool:
        return len(leader.asked("state")) > 1

    await until(asked_again, "the second poll")


async def test_a_lost_answer_in_an_indebted_namespace_is_asked_for_again_before_the_leader_is_fenced(
    woken: Woken, leader: FakeLeader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others of the namespace have run into debt. A failure that cost nothing is not to be paid for by this leader."""
    woken.poller._budget.charge(KEY[0], 3600.0)
    answer, lost = woken.poller._fetch_state, 0

    async def lossy(polled: Any) -> bytes:
        nonlocal lost
        lost += 1
        if lost == 1:
            raise LeaderAnswerError("a packet was lost")
        return await answer(polled)

    monkeypatch.setattr(woken.poller, "_fetch_state", lossy)
    woken.poller.ensure_polled(KEY, poll(leader), TOKEN)
    await reachable(woken)


async def test_a_surprise_is_a_failed_poll(woken: Woken, leader: FakeLeader, monkeypatch: pytest.MonkeyPatch) -> None:
    surprises = 0

    def surprise(*_: object, **__: object) -> None:
        nonlocal surprises
        surprises += 1
        raise ZeroDivisionError

    async def a_few() -> bool:
        return surprises > 2

    with monkeypatch.context() as broken, capture_logs() as logs:
        broken.setattr("everstep_operator.cluster.leader_poller.parse_leader_state", surprise)
        woken.poller.ensure_polled(KEY, poll(leader), TOKEN)
        await until(a_few, "polls that fail")
    assert [entry["event"] for entry in logs if entry["log_level"] == "error"] == [
        "a request to a leader failed unexpectedly"
    ], "once"
    await reachable(woken)


async def test_a_poll_that_has_died_is_begun_again(woken: Woken, leader: FakeLeader) -> None:
    woken.poller.ensure_polled(KEY, poll(leader), TOKEN)
    await reachable(woken)
    (task,) = (t for t in asyncio.all_tasks() if t.get_name() == "leader of ns/digits")
    task.cancel()
    await asyncio.wait((task,))
    woken.poller.ensure_polled(KEY, poll(leader), TOKEN)
    await leader.say(generation=2)

    async def news() -> bool:
        view = woken.poller.view(KEY, "pod-a")
        return view is not None and view.generation == 2

    await until(news, "the second state")


def failed_polls() -> float:
    return REGISTRY.get_sample_value("everstep_leader_polls_total", {"result": "failed"}) or 0.0


async def test_leaders_that_do_not_exist_cost_nearly_nothing(woken: Woken) -> None:
    """Simulated nodes give their pods addresses where nobody lives."""
    count = 200
    before = failed_polls()
    for number in range(count):
        address = f"240.0.{number // 250}.{number % 250 + 1}:8470"  # class E: never routed
        woken.poller.ensure_polled(("ns", f"j{number}"), LeaderPoll(address, "u", 1, 1, "", 3), TOKEN)

    async def have_backed_off() -> bool:
        return failed_polls() - before > 4 * count

    await until(have_backed_off, "some failures of each", 100)
    before = failed_polls()
    await asyncio.sleep(2)
    assert failed_polls() - before <= 3 * count, "they wait for seconds by now"
    assert all(not view.reachable for n in range(count) if (view := woken.poller.view(("ns", f"j{n}"), "u")))
