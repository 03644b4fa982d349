"""CUDA kernels, compiled with nvcc and launched through PyCUDA. Importing it needs neither a GPU nor PyCUDA."""
