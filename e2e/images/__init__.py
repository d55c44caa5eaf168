"""The container images that the scenarios run, built from their Dockerfiles on this machine.

What an image is belongs in ``catalogue.py``, how one is built in ``build.py``. Nothing here knows a cluster: it takes
archives from here, and says which layers it has already.
"""
