"""Memory of a worker: what a batch takes is measured, and a share that does not fit is computed in microbatches."""
