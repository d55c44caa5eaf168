"""A status is written without the fields that the CRDs lack, and with them again once they may have been upgraded."""

from __future__ import annotations

from everstep_operator.cluster import errors
from everstep_operator.cluster.undeclared_fields import LIFETIME_SECONDS, UndeclaredFields

CONDITIONS = [{"type": "Ready", "later": 1}, {"type": "Stalled"}]
STATUS = {"phase": "Running", "nodes": 2, "conditions": CONDITIONS, "timings": {"running": 1}}


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def rejection(*paths: str) -> str:
    """In the words of a real API server."""
    named = "\n".join(f"  {path}: field not declared in schema" for path in paths)
    return f"failed to create typed patch object (ns/digits; everstep.dev/v1alpha1, Kind=TrainingJob): errors:\n{named}"


def test_fields_that_a_rejection_names_are_left_out() -> None:
    fields = UndeclaredFields(Clock())
    assert fields.strip(STATUS) == STATUS
    assert fields.learn(rejection(".status.nodes", '.status.conditions[type="Ready"].later', ".status.timings.running"))
    conditions = [{"type": "Ready"}, {"type": "Stalled"}]
    assert fields.strip(STATUS) == {"phase": "Running", "conditions": conditions, "timings": {}}
    assert STATUS["nodes"] == 2
    assert not fields.learn(rejection(".status.nodes")), "nothing new: to write once more would not help"
    assert not fields.learn("something else")
    assert fields.learn(rejection(".status.timings"))
    assert "timings" not in fields.strip(STATUS)


def test_conditions_of_types_that_the_crds_do_not_list_are_left_out() -> None:
    fields = UndeclaredFields(Clock())
    said = 'TrainingJob.everstep.dev "digits" is invalid: status.conditions[1].type: Unsupported value: "Stalled": '
    assert fields.learn(said + 'supported values: "Ready", "Complete"')
    assert fields.strip(STATUS)["conditions"] == CONDITIONS[:1]
    assert not fields.learn(said)
    assert not fields.learn("status.lastFailure.message: Too long")


def test_without_a_place_for_an_epoch_or_a_charge_nothing_is_written() -> None:
    """Two leaders could have one epoch, and one failure be charged twice."""
    fields = UndeclaredFields(Clock())
    for path in (".status.epoch", '.status.restarts.charges[id="1.1"].id', ".status.transitions[0].start"):
        assert not fields.learn(rejection(".status.nodes", path))
    assert fields.strip(STATUS) == STATUS


def test_what_must_be_on_record_is_not_sent_where_it_may_be_dropped_until_it_was_stored() -> None:
    fields = UndeclaredFields(Clock())
    charged = {**STATUS, "restarts": {"charges": [{"id": "1.1"}]}}
    assert fields.can_hold({"nodes": 2})
    assert not fields.can_hold(STATUS)
    fields.note_stored({**STATUS, "restarts": {"charges": []}})
    assert fields.can_hold(STATUS)
    assert not fields.can_hold(charged), "an empty list shows nothing of its items"
    fields.note_stored(charged)
    assert fields.can_hold(charged)
    assert not fields.learn(rejection(".status.restarts.charges.id"))
    assert not fields.can_hold(STATUS), "these CRDs are older than those before"


def test_they_are_tried_again_after_a_while() -> None:
    clock = Clock()
    fields = UndeclaredFields(clock)
    fields.learn(rejection(".status.nodes"))
    clock.now = LIFETIME_SECONDS - 1
    assert "nodes" not in fields.strip(STATUS)
    clock.now = LIFETIME_SECONDS
    assert "nodes" in fields.strip(STATUS)


def test_the_api_server_s_words_are_an_error_of_their_own() -> None:
    """Taken for a server in trouble the same apply would be sent again and again."""
    error = errors.from_status(500, {"reason": "InternalError", "message": rejection(".status.nodes")})
    assert isinstance(error, errors.Undeclared)
    assert not isinstance(error, errors.ServerError)
