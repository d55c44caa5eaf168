"""`smp.optimizers`: those of apex, which are not offered."""

from __future__ import annotations

from everstep.compat.smdistributed.modelparallel.torch.refused import NotOfferedName

FusedNovoGrad = NotOfferedName("optimizers.FusedNovoGrad")
FusedLamb = NotOfferedName("optimizers.FusedLamb")
