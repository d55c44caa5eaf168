/* Says hello from every rank, then proves that the ranks talk to each other: the sum over all of them must be right. */
#include <mpi.h>
#include <stdio.h>

int main(int argc, char **argv) {
    int rank, size, name_length, sum = 0;
    char host[MPI_MAX_PROCESSOR_NAME];

    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    MPI_Get_processor_name(host, &name_length);

    int mine = rank + 1, expected = size * (size + 1) / 2;
    MPI_Allreduce(&mine, &sum, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
    printf("hello from rank %d of %d on %s: sum %d, expected %d\n", rank, size, host, sum, expected);

    MPI_Finalize();
    return sum == expected ? 0 : 1;
}
