"""Other libraries' names on top of everstep: what scripts that were written for them may go on calling.

Here belong names and their meaning as they are publicly documented; what they do is done elsewhere in everstep. A name
that everstep does not offer is there too, and says so when it is used.
"""

from __future__ import annotations


def install() -> None:
    """Make `import smdistributed.modelparallel.torch as smp` import the part of everstep that has its names.

    Raises:
        ImportError: Another package of that name is installed: which of the two a script means cannot be known.
    """
    from everstep.compat.hook import install_names as install_names

    install_names("smdistributed", "everstep.compat.smdistributed")
