"""The operator key: made once, never read through the API, waited for when another made it."""

from __future__ import annotations

import asyncio
import base64
from pathlib import Path
from typing import Any

import pytest

from everstep_operator.cluster import errors, operator_key


class Secrets:
    """A client that can only create."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.bodies: list[Any] = []

    async def create(self, resource: Any, namespace: str, body: Any) -> Any:
        self.bodies.append((namespace, body))
        if self.error is not None:
            raise self.error
        return body


def taken() -> errors.AlreadyExists:
    return errors.AlreadyExists(409, "AlreadyExists", "it is there")


async def load(client: Secrets, folder: Path, patience: float = 1.0) -> bytes:
    return await operator_key.load_or_create_key(
        client,  # type: ignore[arg-type]
        "everstep-system",
        folder,
        "everstep-operator-key",
        patience=patience,
    )


async def test_a_mounted_key_is_used_and_nothing_is_asked(tmp_path: Path) -> None:
    (tmp_path / "key").write_bytes(b"k" * 32)
    client = Secrets()
    assert await load(client, tmp_path) == b"k" * 32
    assert client.bodies == []


async def test_the_first_operator_makes_it_and_works_with_what_it_made(tmp_path: Path) -> None:
    client = Secrets()
    made = await load(client, tmp_path)
    ((namespace, body),) = client.bodies
    assert namespace == "everstep-system"
    assert base64.b64decode(body["data"]["key"]) == made
    assert len(made) == 32
    assert body["immutable"] is True


@pytest.mark.parametrize("error", [taken(), errors.Unreachable("lost", sent=True)])
async def test_where_another_may_have_made_it_only_the_mount_decides(tmp_path: Path, error: Exception) -> None:
    waiting = asyncio.create_task(load(Secrets(error), tmp_path, patience=60))
    await asyncio.sleep(0.1)
    assert not waiting.done()
    (tmp_path / "key").write_bytes(b"o" * 32)
    assert await waiting == b"o" * 32


async def test_a_key_that_is_never_mounted_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(operator_key.KeyUnavailable, match="optional volume"):
        await load(Secrets(taken()), tmp_path, patience=0.1)


async def test_half_a_key_is_refused(tmp_path: Path) -> None:
    (tmp_path / "key").write_bytes(b"short")
    with pytest.raises(operator_key.KeyUnavailable):
        await load(Secrets(), tmp_path)


async def test_previous_keys_are_the_files_of_their_folder_as_a_kubelet_writes_it(tmp_path: Path) -> None:
    version = tmp_path / "..2026_11_22"
    version.mkdir()
    (tmp_path / "..data").symlink_to(version.name)
    for name, content in (("everstep-operator-key", b"a"), ("everstep-operator-key-2", b"b")):
        (version / name).write_bytes(content * 32)
        (tmp_path / name).symlink_to(Path("..data") / name)
    assert operator_key.read_previous_keys(tmp_path) == (b"a" * 32, b"b" * 32)
    assert operator_key.read_previous_keys(tmp_path / "missing") == ()
    (version / "everstep-operator-key-2").write_bytes(b"short")
    with pytest.raises(operator_key.KeyUnavailable, match="everstep-operator-key-2 has 5 bytes, not 32"):
        operator_key.read_previous_keys(tmp_path)
