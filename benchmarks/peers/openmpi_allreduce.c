/* Peer of `lockstep-bench allreduce`: MPI_Allreduce of floats, in place. Arguments: pairs BYTES CALLS; rank 0 prints
 * "BYTES SECONDS" per pair, where SECONDS is the time of one call. */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  int rank;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  for (int argument = 1; argument + 1 < argc; argument += 2) {
    const int count = atoi(argv[argument]) / 4, calls = atoi(argv[argument + 1]);
    float* values = calloc(count, sizeof(float));
    if (values == NULL) MPI_Abort(MPI_COMM_WORLD, 1);
    const int warm_up = calls / 10 < 2 ? 2 : calls / 10;
    for (int i = 0; i < warm_up; ++i) MPI_Allreduce(MPI_IN_PLACE, values, count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
    MPI_Barrier(MPI_COMM_WORLD);
    const double start = MPI_Wtime();
    for (int i = 0; i < calls; ++i) MPI_Allreduce(MPI_IN_PLACE, values, count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
    const double seconds = (MPI_Wtime() - start) / calls;
    if (rank == 0) printf("%s %.9g\n", argv[argument], seconds);
    free(values);
  }
  MPI_Finalize();
  return 0;
}
