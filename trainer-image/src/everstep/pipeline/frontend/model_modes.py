"""The modes of the model that a script gave, and of what stands for its modules in a stage.

Modules that are in one stage as a whole are the model's own, so `model.eval()` reaches them. The code that a cut opens
follows the flag of a stand-in. So a script that sets the mode of its model sets that of the stand-ins, and a loss that
reads `model.training` reads the mode of the pipeline.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Mapping

from torch import nn

from everstep.pipeline.errors import PipelineError
from everstep.pipeline.frontend.attributes import Reader
from everstep.pipeline.frontend.skeleton import Drawing, Skeleton


class ModelModes:
    """The modules of a model whose code a cut may open, with their stand-ins in one process's part.

    Args:
        model: The model, to which nothing here refers.
        paths: Of these modules.
        part: What stands for the model in this process.
    """

    def __init__(self, model: nn.Module, paths: Collection[str], part: nn.Module) -> None:
        self._pairs: list[tuple[weakref.ref[nn.Module], Skeleton]] = []
        for path, each in part.named_modules():
            if isinstance(each, Skeleton) and (not path or path in paths):
                self._pairs.append((weakref.ref(model.get_submodule(path)), each))
        self._known = [each.training for _, each in self._pairs]

    def adopt(self) -> None:
        """Give the stand-ins the modes that a script has set in the model since."""
        for place, (original, stand_in) in enumerate(self._pairs):
            module = original()
            if module is not None and module.training != self._known[place]:
                self._known[place] = stand_in.training = module.training
                for child in stand_in.children():
                    if isinstance(child, Drawing):
                        child.training = module.training

    def spread(self) -> None:
        """Give the model the modes that a script has set in the pipeline."""
        for place, (original, stand_in) in enumerate(self._pairs):
            module = original()
            if module is not None:
                module.training = self._known[place] = stand_in.training


class SetModes:
    """The training flags that a forward sets, as `self.teacher.eval()` in it does, of which a cut leaves nothing.

    Args:
        modes: By the mode of the model, and by the paths of modules, what they are set to.
        part: What stands for the model in this process, of which only the modules that are in it are set.
    """

    def __init__(self, modes: Mapping[bool, Mapping[str, bool]], part: nn.Module) -> None:
        here = dict(part.named_modules(remove_duplicate=False))
        self._part = (part,)
        self._held = {
            mode: [(here[path], flag) for path, flag in found.items() if path and path in here]
            for mode, found in modes.items()
        }

    def set(self) -> None:
        """Set them as the forward does that comes now."""
        for module, flag in self._held.get(self._part[0].training, ()):
            module.training = flag
            for child in module.children():
                if isinstance(child, Drawing):
                    child.training = flag


class ReadModes:
    """The training flags that the code of another module reads: a stage has what followed from them.

    Args:
        modes: By the paths of the reader and of what it reads, the flag of the latter for each flag of the former.
        part: What stands for the model in this process, of which only the modules that are in it are looked at.
    """

    def __init__(self, modes: Mapping[Reader, Mapping[bool, bool]], part: nn.Module) -> None:
        here = dict(part.named_modules(remove_duplicate=False))
        self._held = [
            (reader, path, here[reader], here[path], dict(known))
            for (reader, path), known in modes.items()
            if reader in here and path in here
        ]

    def check(self) -> None:
        """Compare all of them with what they were.

        Raises:
            PipelineError: If one is another than in the trace of this mode, with both modules.
        """
        for reader, path, around, module, known in self._held:
            if module.training != known.get(around.training, module.training):
                raise PipelineError(
                    f"module {path!r} is in {_name_mode(module)}, and was not when pipeline() traced the code of "
                    f"{repr(reader) if reader else 'the model'} in {_name_mode(around)}, which reads its training "
                    "flag: the stages have what followed from that; let each module's code read its own flag, or set "
                    "both alike"
                )


def _name_mode(module: nn.Module) -> str:
    return "training" if module.training else "evaluation"
