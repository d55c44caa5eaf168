"""Memory of slots that GPUs may write into by themselves (page-locked), and is given back before it is unmapped."""

from __future__ import annotations

import contextlib
import logging

import torch

from everstep.checkpoint.errors import CheckpointError

_log = logging.getLogger("everstep.checkpoint")

_PORTABLE = 1  # cudaHostRegisterPortable: for all devices of this process
_ALREADY_REGISTERED = 712  # cudaErrorHostMemoryAlreadyRegistered

# A GPU may still write there, or the driver still takes the addresses for the old pages: they are never used again.
_kept_for_ever: list[torch.Tensor] = []


class PinnedMemory:
    """Registers memory with CUDA; what was not registered gets its bytes as well, but holds training up."""

    def __init__(self) -> None:
        self._registered: list[tuple[torch.Tensor, torch.device]] = []

    def register(self, memory: torch.Tensor, device: torch.device) -> None:
        """Register the bytes of a tensor, once.

        Args:
            memory: One dimension of bytes, over a mapping of its own.
            device: One that this process uses: a context on another would take memory there.

        Raises:
            CheckpointError: These addresses are registered, and not for this memory.
        """
        if not memory.nbytes:
            return
        code = _register_memory(memory, device)
        if code == _ALREADY_REGISTERED:
            # By somebody who unmapped what was here before: copies would go to those pages, and none would say so.
            _unregister_memory(memory, device)
            code = _register_memory(memory, device)
        if code == _ALREADY_REGISTERED:
            raise CheckpointError(
                f"the {memory.nbytes} bytes of a slot at {memory.data_ptr():#x} are registered with CUDA by other code "
                "else in this process: unregister (cudaHostUnregister) what was mapped there before it is unmapped"
            )
        if code == 0:
            self._registered.append((memory, device))
            return
        name = torch.cuda.cudart().cudaGetErrorString(torch.cuda.cudart().cudaError(code))
        _log.warning(
            "%d bytes of a slot could not be page-locked (%s): each save holds training up while they are copied. "
            "Allow the container to lock that much memory to avoid it.",
            memory.nbytes,
            name,
        )

    def release(self, *, is_idle: bool) -> None:
        """Unregister everything, which must happen before it is unmapped.

        Args:
            is_idle: No GPU writes there any more. Otherwise all of it is kept, mapped, until the process ends.
        """
        registered, self._registered = self._registered, []
        for memory, device in registered:
            if not is_idle or _unregister_memory(memory, device) != 0:
                _kept_for_ever.append(memory)


def _register_memory(memory: torch.Tensor, device: torch.device) -> int:
    with torch.cuda.device(device):
        code = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, _PORTABLE))
    return _clear_cuda_error(code, device)


def _unregister_memory(memory: torch.Tensor, device: torch.device) -> int:
    with torch.cuda.device(device):
        code = int(torch.cuda.cudart().cudaHostUnregister(memory.data_ptr()))
    return _clear_cuda_error(code, device)


def _clear_cuda_error(code: int, device: torch.device) -> int:
    """Clear CUDA's last error, and return the same code.

    CUDA keeps the last error until somebody asks, and torch asks after each kernel that it starts: training's next
    kernel would fail for it. So a kernel that nobody needs fails instead.
    """
    if code != 0:
        with contextlib.suppress(RuntimeError):
            torch.full((1,), 1.0, device=device)
    return code
