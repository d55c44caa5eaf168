/* Every rank adds its number to a sum over all; then does what the first argument says. */
#include <mpi.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

int main(int argc, char **argv) {
    int rank, size, sum;
    const char *what = argc > 1 ? argv[1] : "end";
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    MPI_Allreduce(&rank, &sum, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
    printf("rank %d of %d, sum %d, RANK=%s LOCAL_RANK=%s NODE_RANK=%s SM_CURRENT_HOST=%s\n", rank, size, sum,
           getenv("RANK"), getenv("LOCAL_RANK"), getenv("NODE_RANK"), getenv("SM_CURRENT_HOST"));
    FILE *progress = fopen(getenv("EVERSTEP_PROGRESS"), "w");
    fprintf(progress, "step=%d total=10\n", rank);
    fclose(progress);
    fflush(stdout);
    if (rank == size - 1) {
        if (!strcmp(what, "exit")) exit(7);
        if (!strcmp(what, "kill")) raise(SIGKILL);
        if (!strcmp(what, "abort")) MPI_Abort(MPI_COMM_WORLD, 7);
    }
    if (strcmp(what, "end")) pause();
    MPI_Finalize();
    return 0;
}
