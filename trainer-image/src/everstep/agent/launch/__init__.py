"""Ways to start the ranks of a job: directly (torch, none), or through an MPI launcher of the user's image.

Supported MPIs: Open MPI 4 and 5, MPICH and Intel MPI (Hydra). Nothing here knows of leaders, links or restarts.
"""
